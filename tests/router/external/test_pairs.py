"""Prefill and decode servers of vLLM and SGLang: each half as its server wants it, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from headrace.core.errors import InvalidRequestError, UnavailableError, UnsupportedFieldError
from headrace.core.routing import Endpoint
from headrace.router.external import make_worker
from headrace.router.external.http_client import HTTPClient
from headrace.router.external.pair import with_fields
from headrace.router.external.recognise import recognise
from headrace.router.external.worker import ExternalWorker
from tests.router.external import engines
from tests.router.external.pair_engines import SGLangPair, VLLMPair
from tests.router.external.stand_in import Ear, StandIn, make_request, until

LOG = logging.getLogger("test")
PROMPT = [10, 20, 30]


class PairEar(Ear):
    """A PairReceiver that keeps what it hears."""

    def __init__(self, num_samples: int = 1) -> None:
        super().__init__(num_samples)
        self.prefill_failure: tuple[Any, str] | None = None

    def on_prefill_failed(self, error: Any, outcome: str) -> None:
        assert not self._done.is_set(), "nothing follows an end"
        self.prefill_failure = (error, outcome)
        self._done.set()


class Rig:
    """Two stand-ins and a worker for each."""

    def __init__(self, kind: str, **fields: Any) -> None:
        self.kind = kind
        self.fields = fields
        self.servers = StandIn(), StandIn()
        prefill, decode = self.servers
        self.pair: Any
        if kind == "sglang":
            self.pair = SGLangPair(prefill, decode, bootstrap_port=fields.get("bootstrap_port") or 8998)
        else:
            self.pair = VLLMPair(prefill, decode, scale_out=kind == "vllm")

    async def __aenter__(self) -> Rig:
        workers = []
        for server, role in zip(self.servers, ("prefill", "decode"), strict=True):
            await server.__aenter__()
            endpoint = Endpoint(replica_id=role, model="m", address=server.url, role=role)
            if role == "prefill":
                endpoint = msgspec.structs.replace(endpoint, **self.fields)
            client = HTTPClient(server.url, log=LOG)
            found = await recognise(client, endpoint)
            await client.close()
            worker = make_worker(endpoint, found.capabilities, log=LOG)
            assert isinstance(worker, ExternalWorker)
            workers.append(worker)
        self.prefill, self.decode = workers
        return self

    async def __aexit__(self, *args: object) -> None:
        for worker in (self.prefill, self.decode):
            await worker.close()
        for server in self.servers:
            await server.__aexit__(*args)

    def submit(self, prompt: list[int] = PROMPT, **fields: Any) -> tuple[Any, PairEar]:
        ear = PairEar(fields.get("n", 1))
        both = self.decode.paired(self.prefill)
        both.submit(make_request(prompt, **fields), ear)
        return both, ear

    async def run(self, prompt: list[int] = PROMPT, **fields: Any) -> PairEar:
        _, ear = self.submit(prompt, **fields)
        await ear.wait()
        return ear


VLLMS = ("vllm", "vllm-completions")


@pytest.fixture(params=[*VLLMS, "sglang"])
async def rig(request):
    async with Rig(request.param) as rig:
        yield rig


@pytest.fixture(params=VLLMS)
async def vllm(request):
    async with Rig(request.param) as rig:
        yield rig


@pytest.fixture
async def sglang():
    async with Rig("sglang") as rig:
        yield rig


async def test_tokens_come_from_the_decode_side_alone(rig):
    ear = await rig.run(max_tokens=5)
    assert ear.failure is None and ear.prefill_failure is None
    assert ear.tokens() == [60, 61, 62, 63, 64]
    assert ear.outputs[-1].finish_reason == "length"
    if rig.kind == "sglang":
        assert len(rig.pair.used) == 1
    else:
        assert rig.pair.pulled == ["blocks-1"] and not rig.pair.kept and not rig.pair.computed


async def test_every_parameter_reaches_the_decode_side(rig):
    fields = {"temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_tokens": 2, "max_tokens": 4, "seed": 3,
              "stop_token_ids": [77], "logprobs": 1}  # fmt: skip
    ear = await rig.run(**fields)
    assert len(ear.tokens()) == 4
    body = rig.pair.decode.bodies[0]
    sent = body.get("sampling_params", body)
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.5, 0.8, 7)
    assert 2 in (sent.get("min_tokens"), sent.get("min_new_tokens"))
    assert body["stream"] is True
    assert all(output.logprobs for output in ear.outputs if output.token_ids)


async def test_each_sample_has_two_halves_of_its_own(rig):
    ear = await rig.run(n=3, max_tokens=3)
    for sample in range(3):
        assert ear.tokens(sample) == [60, 61, 62]
    if rig.kind == "sglang":
        assert len(set(rig.pair.used)) == 3
    else:
        assert sorted(rig.pair.pulled) == ["blocks-1", "blocks-2", "blocks-3"] and not rig.pair.kept


async def test_a_rescued_sample_goes_on_with_what_is_left(rig):
    ear = await rig.run([10, 20, 30, 60, 61], num_output_tokens=2, sample_index=1, max_tokens=6)
    assert len(ear.tokens(1)) == 4 and not ear.tokens(0)


async def test_a_prefill_side_that_is_gone_is_told_and_the_decode_half_is_not_left_waiting(rig):
    await rig.servers[0].stop()
    ear = await rig.run()
    assert ear.failure is None and not ear.outputs
    error, outcome = ear.prefill_failure
    assert isinstance(error, UnavailableError) and outcome == "replica_gone"
    if rig.kind == "sglang":
        await until(lambda: rig.pair.decode.num_gone == len(rig.pair.decode_bodies))
    else:
        assert rig.pair.decode.bodies == []


async def test_a_prefill_side_that_fails_is_at_fault_and_the_next_attempt_is_fresh(rig):
    if rig.kind == "sglang":
        rig.pair.prefill_ends = (500, "out of memory")
    else:
        rig.pair.status = (500, {"error": {"message": "out of memory"}})
    ear = await rig.run()
    error, outcome = ear.prefill_failure
    assert "out of memory" in error.message and outcome == "replica_fault" and not ear.outputs
    if rig.kind == "sglang":
        await until(lambda: rig.pair.decode.num_gone == 1)
        rig.pair.prefill_ends = None
    else:
        assert not rig.pair.decode.bodies
        rig.pair.status = None
    ear = await rig.run(request_id="again", max_tokens=3)
    assert ear.tokens() == [60, 61, 62]
    if rig.kind == "sglang":
        assert len(set(rig.pair.used)) == 2, "a room was used twice"


async def test_an_aborted_prefill_is_never_an_answer(rig):
    if rig.kind == "sglang":
        rig.pair.prefill_ends = (200, "aborted by the scheduler")
    else:
        rig.pair.mode = "abort"
    ear = await rig.run()
    assert not ear.outputs and ear.prefill_failure[1] == "replica_fault"
    if rig.kind == "sglang":
        await until(lambda: rig.pair.decode.num_gone == 1)


async def test_what_the_caller_did_wrong_is_the_callers(vllm):
    vllm.pair.status = (400, {"error": {"message": "bad temperature"}})
    ear = await vllm.run()
    error, outcome = ear.prefill_failure
    assert isinstance(error, InvalidRequestError) and outcome == "caller_fault"


async def test_a_full_prefill_side_is_not_at_fault(vllm):
    vllm.pair.status = (429, {"error": {"message": "too many"}})
    ear = await vllm.run()
    assert ear.prefill_failure[1] == "aborted"


async def test_a_caller_who_leaves_between_the_halves_ends_both(rig):
    if rig.kind == "sglang":
        rig.pair.prefill_hangs = True
    else:
        rig.pair.mode = "hang"
    both, ear = rig.submit()
    if rig.kind == "sglang":
        await until(lambda: rig.pair.decode_bodies and rig.pair.used)
    else:
        await until(lambda: rig.pair.prefill_bodies)
    both.abort("req")
    if rig.kind == "sglang":
        await until(lambda: rig.pair.num_prefill_gone == 1 and rig.pair.decode.num_gone == 1)
    else:
        await until(lambda: rig.pair.num_gone == 1)
        assert not rig.pair.decode.bodies, "nothing is asked to decode for nobody"
    assert not ear.outputs and ear.failure is None and ear.prefill_failure is None


async def test_a_caller_who_leaves_later_ends_the_decode_half(rig):
    rig.pair.decode.hold = 2
    both, ear = rig.submit(max_tokens=50)
    await until(lambda: len(ear.tokens()) == 2)
    both.abort("req", 0)
    await until(lambda: rig.pair.decode.num_gone == 1)


async def test_a_decode_side_that_dies_is_told_as_such(rig):
    rig.pair.decode.die = 2
    ear = await rig.run(n=2, max_tokens=50)
    assert ear.prefill_failure is None and ear.failure[1] == "replica_gone"


async def test_a_decode_side_that_cannot_be_reached_ends_the_prefill_half(rig):
    await rig.servers[1].stop()
    if rig.kind == "sglang":
        rig.pair.prefill_hangs = True
    ear = await rig.run()
    assert ear.failure[1] == "replica_gone" and ear.prefill_failure is None
    if rig.kind == "sglang":
        await until(lambda: rig.pair.num_prefill_gone == len(rig.pair.used))


async def test_closed_workers_refuse(rig):
    await rig.prefill.close()
    both = rig.decode.paired(rig.prefill)
    assert not both.alive
    with pytest.raises(UnavailableError):
        both.submit(make_request(PROMPT), PairEar())


async def test_without_parameters_the_decode_side_computes_the_prompt_and_says_so(vllm):
    vllm.pair.mode = "none"
    ear = await vllm.run(max_tokens=3)
    assert ear.tokens() == [60, 61, 62] and vllm.pair.computed == [PROMPT]
    timing = ear.outputs[0].timing
    assert timing.num_fetched_tokens == 0 and timing.num_computed_tokens == 3 and timing.fill_s > 0


async def test_what_was_handed_over_is_told(vllm):
    ear = await vllm.run(max_tokens=3)
    timing = ear.outputs[0].timing
    assert timing.num_fetched_tokens == len(PROMPT) and timing.num_computed_tokens == 0
    assert all(output.timing is None for output in ear.outputs[1:])


async def test_garbage_from_the_prefill_side_is_its_fault(vllm):
    vllm.pair.status = (200, {"choices": "none"})
    ear = await vllm.run()
    assert ear.prefill_failure[1] == "replica_fault"
    vllm.pair.status = (200, {"error": {"message": "engine died", "code": 500}})
    ear = await vllm.run(request_id="again")
    assert "engine died" in ear.prefill_failure[0].message


async def test_the_bootstrap_port_is_the_endpoints():
    async with Rig("sglang", bootstrap_port=7777) as rig:
        ear = await rig.run(max_tokens=2)
        assert ear.tokens() == [60, 61]


async def test_sglang_cannot_tell_of_the_prompt_when_apart(sglang):
    with pytest.raises(UnsupportedFieldError) as caught:
        sglang.submit(prompt_logprobs=1)
    assert caught.value.param == "prompt_logprobs"
    assert not sglang.pair.used and not sglang.pair.decode_bodies


async def test_a_prefill_side_that_goes_after_its_part_is_done_disturbs_nobody(sglang):
    sglang.pair.dies_late = asyncio.Event()
    sglang.pair.decode.hold = 2
    _, ear = sglang.submit(max_tokens=4)
    await until(lambda: len(ear.tokens()) == 2)
    sglang.pair.dies_late.set()
    await until(lambda: not sglang.prefill.client.calls)
    sglang.pair.decode.released.set()
    await ear.wait()
    assert ear.tokens() == [60, 61, 62, 63] and ear.prefill_failure is None


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_what_a_pair_cannot_do_is_told(kind):
    async with Rig(kind) as rig:
        words = " ".join(rig.decode.capabilities.limits)
        assert {"vllm": "own timeout", "sglang": "prompt_logprobs"}[kind] in words


async def test_a_server_that_knows_no_halves_cannot_have_a_role():
    async with StandIn() as server:
        engines.llama_server(server)
        client = HTTPClient(server.url, log=LOG)
        with pytest.raises(UnavailableError) as caught:
            await recognise(client, Endpoint(replica_id="w", model="m", address=server.url, role="prefill"))
        await client.close()
        assert "llama-server" in caught.value.message and "vllm and sglang" in caught.value.hint


def test_fields_of_a_body_are_replaced_added_and_taken_out():
    body = b'{"a": [1, 2], "b": {"x": null}, "c": 3}'
    changed = msgspec.json.decode(with_fields(body, c=4, d={"y": None}, b=None))
    assert changed == {"a": [1, 2], "c": 4, "d": {"y": None}}
