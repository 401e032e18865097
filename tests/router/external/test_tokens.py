"""Tokens in and out of each engine: every parameter, logprobs, ends, aborts, failures."""

from __future__ import annotations

import logging

import pytest

from headrace.core.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnsupportedFieldError,
)
from headrace.core.routing import Endpoint
from headrace.router.external import make_worker
from headrace.router.external.http_client import HTTPClient
from headrace.router.external.recognise import recognise
from headrace.router.external.worker import ExternalWorker
from tests.router.external import engines
from tests.router.external.stand_in import Ear, StandIn, make_request, until

LOG = logging.getLogger("test")
MAKERS = {
    "vllm": engines.vllm,
    "vllm-completions": lambda server: engines.vllm(server, scale_out=False),
    "sglang": engines.sglang,
    "sglang-incremental": lambda server: engines.sglang(server, incremental=True),
    "llama-server": engines.llama_server,
    "tensorrt-llm": engines.tensorrt_llm,
}
PROMPT = [10, 20, 30]


class Rig:
    """A stand-in and a worker for it, made as the dispatcher makes it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.server = StandIn()
        self.engine = MAKERS[kind](self.server)

    async def __aenter__(self) -> Rig:
        await self.server.__aenter__()
        endpoint = Endpoint(replica_id="w", model="m", address=self.server.url)
        client = HTTPClient(self.server.url, log=LOG)
        found = await recognise(client, endpoint)
        await client.close()
        worker = make_worker(endpoint, found.capabilities, log=LOG)
        assert isinstance(worker, ExternalWorker)
        self.worker = worker
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.worker.close()
        await self.server.__aexit__(*args)

    async def run(self, prompt: list[int] = PROMPT, **fields) -> Ear:
        ear = Ear(fields.get("n", 1))
        self.worker.submit(make_request(prompt, **fields), ear)
        await ear.wait()
        return ear


@pytest.fixture(params=MAKERS)
async def rig(request):
    async with Rig(request.param) as rig:
        yield rig


async def test_tokens_come_out_and_the_length_ends_them(rig):
    ear = await rig.run(max_tokens=5)
    assert ear.failure is None
    assert ear.tokens() == [60, 61, 62, 63, 64]
    last = ear.outputs[-1]
    assert (last.finish_reason, last.stop_token) == ("length", None)
    assert last.num_cached_tokens == rig.engine.num_cached
    assert {output.request_id for output in ear.outputs} == {"req"}


async def test_the_end_of_sequence_token_is_named_and_is_the_last(rig):
    ear = await rig.run([990, 10], max_tokens=20)
    assert ear.tokens() == [0, 1, 2]
    assert (ear.outputs[-1].finish_reason, ear.outputs[-1].stop_token) == ("stop", 2)


async def test_a_stop_token_id_ends_it(rig):
    ear = await rig.run(max_tokens=50, stop_token_ids=[63])
    assert ear.tokens() == [60, 61, 62, 63]
    assert (ear.outputs[-1].finish_reason, ear.outputs[-1].stop_token) == ("stop", 63)


async def test_every_parameter_arrives(rig):
    fields = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "ignore_eos": True, "logit_bias": {9: -5.0},
        "max_tokens": 4, "seed": -3,
    }  # fmt: skip
    if rig.kind != "llama-server":
        fields["min_tokens"] = 2
    await rig.run(**fields)
    body = rig.engine.bodies[0]
    sent = body.get("sampling_params", body)
    for name, value in fields.items():
        if name == "seed":
            seed = sent.get("seed", sent.get("sampling_seed"))
            assert seed is not None and seed >= 0
        elif name == "logit_bias":
            assert sent[name] in ({"9": -5.0}, [[9, -5.0]])
        else:
            aliases = {"max_tokens": ("max_new_tokens", "n_predict"), "min_tokens": ("min_new_tokens",),
                       "repetition_penalty": ("repeat_penalty",)}.get(name, ())  # fmt: skip
            assert value in [sent.get(alias) for alias in (name, *aliases)], name
    if rig.kind == "llama-server":
        assert sent["repeat_last_n"] == len(PROMPT) + 4
        assert sent["samplers"][0] == "penalties"


async def test_parameters_that_an_engine_lacks_are_refused_by_name(rig):
    lacking = {
        "llama-server": ["min_tokens", "prompt_logprobs"],
        "tensorrt-llm": ["logprobs", "prompt_logprobs"],
    }
    for name in lacking.get(rig.kind, []):
        with pytest.raises(UnsupportedFieldError) as caught:
            rig.worker.submit(make_request(PROMPT, **{name: 1}), Ear())
        assert caught.value.param == name
    assert not rig.engine.bodies


async def test_samples_are_requests_of_their_own_with_seeds_of_their_own(rig):
    ear = await rig.run(n=3, max_tokens=3, temperature=1.0)
    for sample in range(3):
        assert ear.tokens(sample) == [60, 61, 62]
    sent = [body.get("sampling_params", body) for body in rig.engine.bodies]
    seeds = {params.get("seed", params.get("sampling_seed")) for params in sent}
    assert len(sent) == len(seeds) == 3


async def test_a_rescued_sample_goes_on_with_what_is_left_of_its_limits(rig):
    fields = {} if rig.kind == "llama-server" else {"min_tokens": 5}
    ear = await rig.run([10, 20, 30, 60, 61], num_output_tokens=2, sample_index=1, max_tokens=6, **fields)
    body = rig.engine.bodies[0]
    sent = body.get("sampling_params", body)
    assert 4 in (sent.get("max_tokens"), sent.get("max_new_tokens"), sent.get("n_predict"))
    if fields:
        assert 3 in (sent.get("min_tokens"), sent.get("min_new_tokens"))
    assert len(ear.tokens(1)) == 4 and not ear.tokens(0)


async def test_no_limit_is_what_the_context_has_room_for(rig):
    await rig.run([999, 1], max_tokens=None)
    body = rig.engine.bodies[0]
    sent = body.get("sampling_params", body)
    limits = [sent[name] for name in ("max_tokens", "max_new_tokens", "n_predict") if name in sent]
    assert limits in ([], [None], [-1])


async def test_logprobs(rig):
    if rig.kind == "tensorrt-llm":
        return
    ear = await rig.run(max_tokens=3, logprobs=1)
    entries = [entry for output in ear.outputs for entry in output.logprobs]
    assert [entry.token_id for entry in entries] == [60, 61, 62]
    for entry in entries:
        assert entry.logprob == -1.5 and entry.rank == 2
        assert entry.top == [(5, -0.5)]


async def test_prompt_logprobs(rig):
    if rig.kind in ("tensorrt-llm", "llama-server"):
        return
    ear = await rig.run(max_tokens=2, prompt_logprobs=1)
    assert ear.tokens() == [60, 61]
    entries = ear.outputs[0].prompt_logprobs
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == [20, 30]
    assert all(len(entry.top) == 1 and entry.top[0][1] == -0.5 for entry in entries[1:])
    assert all(output.prompt_logprobs is None for output in ear.outputs[1:])


async def test_an_abort_reaches_the_engine_in_mid_stream_and_before_the_first_token(rig):
    for hold in (0, 2):
        rig.engine.hold = hold
        ear = Ear()
        rig.worker.submit(make_request(PROMPT, max_tokens=100), ear)
        await until(lambda: rig.engine.bodies and len(ear.tokens()) >= hold)  # noqa: B023
        gone = rig.engine.num_gone
        rig.worker.abort("req")
        await until(lambda: rig.engine.num_gone == gone + 1)  # noqa: B023
        assert ear.failure is None and len(ear.tokens()) == hold
        rig.engine.bodies.clear()


async def test_one_sample_is_aborted_alone(rig):
    rig.engine.hold = 1
    ear = Ear(1)
    rig.worker.submit(make_request(PROMPT, n=2, max_tokens=4), ear)
    await until(lambda: len(ear.tokens(0)) == len(ear.tokens(1)) == 1)
    rig.worker.abort("req", 0)
    await until(lambda: rig.engine.num_gone == 1)
    rig.engine.released.set()
    await ear.wait()
    assert len(ear.tokens(0)) == 1 and len(ear.tokens(1)) == 4


async def test_a_server_that_dies_in_mid_stream_is_gone(rig):
    rig.engine.die = 2
    ear = await rig.run(max_tokens=9)
    error, outcome = ear.failure
    assert isinstance(error, UnavailableError) and outcome == "replica_gone"
    assert ear.tokens() == [60, 61]


async def test_one_dead_sample_fails_the_request_once(rig):
    rig.engine.die = 1
    ear = Ear(2)
    rig.worker.submit(make_request(PROMPT, n=2, max_tokens=9), ear)
    await ear.wait()
    assert ear.failure[1] == "replica_gone"
    await until(lambda: not rig.worker.client.calls)


@pytest.mark.parametrize(
    ("status", "body", "kind", "outcome"),
    [
        (400, {"error": {"message": "temperature is bad"}}, InvalidRequestError, "caller_fault"),
        (422, {"detail": [{"loc": ["top_p"]}]}, InvalidRequestError, "caller_fault"),
        (400, {"error": {"message": "exceeds the context length"}}, ContextLengthError, "caller_fault"),
        (429, {"error": {"message": "slow down"}}, OverloadedError, "caller_fault"),
        (401, {"error": "Unauthorized"}, UnavailableError, "replica_fault"),
        (500, {"error": {"message": "CUDA error"}}, EngineError, "replica_fault"),
        (503, {"message": "loading"}, UnavailableError, "replica_fault"),
    ],
)
async def test_refusals(rig, status, body, kind, outcome):
    rig.engine.error = (status, body)
    ear = await rig.run()
    error, told = ear.failure
    assert type(error) is kind and told == outcome
    words = body.get("error", body.get("message", body.get("detail")))
    words = words["message"] if isinstance(words, dict) else "top_p" if isinstance(words, list) else words
    assert words in error.message


async def test_a_stream_that_ends_early_or_is_garbage(rig):
    path = rig.worker.capabilities.path

    async def early(exchange):
        exchange.start_stream()
        exchange.end_stream()

    async def garbage(exchange):
        exchange.start_stream()
        exchange.event(b"<html>")

    async def error_inside(exchange):
        exchange.start_stream()
        exchange.event({"error": {"message": "out of memory", "code": 500}})
        exchange.end_stream()

    for route, words in ((early, ""), (garbage, "no answer"), (error_inside, "out of memory")):
        rig.server.post(path, route)
        ear = await rig.run()
        error, outcome = ear.failure
        assert outcome == "replica_fault" and words in error.message, route


async def test_tokens_inside_characters_are_found_again():
    async with Rig("llama-server") as rig:
        ear = await rig.run([500], max_tokens=7)
        assert ear.tokens() == [500, 501, 502, 503, 504, 505, 506]
        assert [output.token_ids for output in ear.outputs][:2] == [[500, 501], [502, 503]]
        assert ear.outputs[0].num_cached_tokens == rig.engine.num_cached
        assert len(rig.server.of("/tokenize")) == 3


async def test_tokens_that_cannot_be_found_again_are_a_fault():
    async with Rig("llama-server") as rig:
        rig.engine.tokenizes = False
        ear = await rig.run([500], max_tokens=4)
        assert ear.failure[1] == "replica_fault" and "left out 1 tokens" in ear.failure[0].message


async def test_a_silent_server_is_given_up_and_a_slow_one_is_not():
    async with Rig("vllm") as rig:
        worker = ExternalWorker(rig.worker.endpoint, rig.worker.capabilities, log=LOG, silence_s=0.1)
        rig.engine.hold = 0
        ear = Ear()
        worker.submit(make_request(PROMPT, max_tokens=3), ear)
        await until(lambda: len([seen for seen in rig.server.seen if seen.path == "/health"]) >= 2)
        assert ear.failure is None, "it answers when asked, so it may take its time"

        async def mute(exchange):
            await exchange.gone.wait()

        rig.server.routes["/health"] = mute
        await ear.wait()
        assert ear.failure[1] == "replica_gone"
        await worker.close()


async def test_after_close_nothing_is_taken(rig):
    ear = Ear()
    rig.engine.hold = 0
    rig.worker.submit(make_request(PROMPT), ear)
    await until(lambda: rig.engine.bodies)
    await rig.worker.close()
    assert ear.failure[1] == "replica_gone" and not rig.worker.alive
    with pytest.raises(UnavailableError):
        rig.worker.submit(make_request(PROMPT), Ear())
