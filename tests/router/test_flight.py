"""One request through deaths, hand-overs and refusals: each token once, each lease released."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest

from headrace.core.errors import EngineError, InvalidRequestError, UnavailableError
from headrace.core.identity import block_identities, split_identities
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Failed, Step
from tests.router.fleet import fleet
from tests.router.flights import LENGTH, beset, check, once
from tests.router.replicas import BLOCK_SIZE, ROOT, expected, make_request, until


@pytest.mark.parametrize("trouble", ["die", "garbage", "half", "fail", "stop"])
@pytest.mark.parametrize("position", range(LENGTH))
async def test_a_stream_goes_on_token_for_token_wherever_it_breaks(tmp_path, trouble, position):
    async with fleet(tmp_path) as f:
        beset(f.replicas, once(trouble, position=position))
        request = make_request(max_tokens=LENGTH)
        sink = f.submit(request)
        await until(lambda: sink.ended)
        check(sink, request)
        assert sink.flight.num_rescues == 1
        await f.quiet()
        (again,) = [r for replica in f.replicas for r in replica.submits if r != request]
        assert again.request_id != request.request_id  # what still comes of the former is not taken for it
        assert again.sampling == request.sampling
        count = again.num_output_tokens
        assert count == position or trouble == "garbage"  # which takes along what came in the same read
        assert list(again.token_ids())[10:] == expected(request, count=count)
        if count:
            chain = block_identities(ROOT, again.prompt, BLOCK_SIZE)
            assert split_identities(again.block_ids) == chain


@pytest.mark.parametrize("trouble", ["die", "fail", "stop"])
@pytest.mark.parametrize("sample", [0, 2])
@pytest.mark.parametrize("position", [0, 1, LENGTH - 1])
async def test_several_samples_each_go_on_from_their_own_last_token(tmp_path, trouble, sample, position):
    async with fleet(tmp_path) as f:
        beset(f.replicas, once(trouble, sample=sample, position=position))
        request = make_request(max_tokens=LENGTH, n=3)
        sink = f.submit(request)
        await until(lambda: sink.ended)
        check(sink, request)
        await f.quiet()


async def test_samples_that_have_ended_or_were_stopped_are_not_resumed(tmp_path):
    async with fleet(tmp_path) as f:
        request = make_request(max_tokens=LENGTH, n=3)
        beset(f.replicas, once("die", sample=2, position=5))
        sink = f.submit(request)

        def stop_one(outputs):
            if len(sink.tokens(1)) == 2:
                sink.flight.abort_sample(1)

        sink.after = stop_one
        await until(lambda: sink.ended)
        assert sink.tokens(0) == expected(request, 0)
        assert sink.tokens(1) == expected(request, 1, 2)
        assert sink.tokens(2) == expected(request, 2)
        again = [r for replica in f.replicas for r in replica.submits if r.num_output_tokens]
        assert sorted(r.sample_index for r in again) == [0, 2]
        await f.quiet()


async def test_log_probabilities_come_once_for_each_token_and_once_for_the_prompt(tmp_path):
    async with fleet(tmp_path) as f:
        beset(f.replicas, once("die", position=4))
        request = make_request(max_tokens=LENGTH, logprobs=1, prompt_logprobs=0)
        sink = f.submit(request)
        await until(lambda: sink.ended)
        check(sink, request)
        positions = [-entry.logprob for output in sink.outputs for entry in output.logprobs]
        assert positions == list(range(1, LENGTH + 1))
        assert sum(output.prompt_logprobs is not None for output in sink.outputs) == 1
        again = [r for replica in f.replicas for r in replica.submits if r.num_output_tokens]
        assert [r.sampling.prompt_logprobs for r in again] == [None]
        assert again[0].sampling == msgspec.structs.replace(request.sampling, prompt_logprobs=None)


async def test_a_prompts_log_probabilities_are_asked_for_again_if_they_never_came(tmp_path):
    async with fleet(tmp_path) as f:
        beset(f.replicas, once("die", position=0))
        sink = f.submit(make_request(prompt_logprobs=0))
        await until(lambda: sink.ended)
        assert sum(output.prompt_logprobs is not None for output in sink.outputs) == 1


async def test_several_deaths_in_a_row(tmp_path):
    async with fleet(tmp_path, 4) as f:
        deaths = {2, 3, 6}
        beset(
            f.replicas,
            lambda request, index, at: deaths.discard(at) or "die" if at in deaths else None,
        )
        request = make_request(max_tokens=LENGTH, n=2)
        sink = f.submit(request)
        await until(lambda: sink.ended)
        check(sink, request)
        assert sink.flight.num_rescues == 3
        await f.quiet()


async def test_more_deaths_than_moves_end_in_an_error(tmp_path):
    config = RouterConfig(routing_policy="round_robin", max_rescues=2)
    async with fleet(tmp_path, 4, config=config) as f:
        beset(f.replicas, lambda request, index, at: "die" if at == 2 + request.num_output_tokens else None)
        sink = f.submit(make_request())
        await until(lambda: sink.ended)
        assert isinstance(sink.error, UnavailableError)
        assert sink.flight.num_rescues == 2
        assert sink.tokens() == expected(make_request(), count=6)
        await f.quiet()


async def test_a_living_replicas_faults_are_retried_within_the_budget_only(tmp_path):
    config = RouterConfig(routing_policy="round_robin", retry_budget=0.0)
    async with fleet(tmp_path, config=config) as f:
        beset(f.replicas, once("fail"))
        sink = f.submit(make_request())
        await until(lambda: sink.ended)
        assert isinstance(sink.error, EngineError)
        beset(f.replicas, once("die"))
        sink = f.submit(make_request("again"))
        await until(lambda: sink.ended)
        check(sink, make_request("again"))  # a death is no retry


async def test_the_callers_fault_is_not_retried(tmp_path):
    async with fleet(tmp_path) as f:
        for replica in f.replicas:
            replica.paused = True
        sink = f.submit(make_request())
        await until(lambda: any(replica.submits for replica in f.replicas))
        replica = f.on(sink.flight)
        failed = Failed("r", 400, "invalid_request_error", "no such thing", "prompt")
        replica.peers[0].send(Step(outputs=[], failed=[failed], stats=replica.stats))
        await until(lambda: sink.ended)
        assert isinstance(sink.error, InvalidRequestError) and sink.error.param == "prompt"
        assert sum(len(replica.submits) for replica in f.replicas) == 1
        await until(lambda: replica.aborts)
        replica.samples.clear()
        await f.quiet()


async def test_a_replica_that_has_just_begun_to_drain_is_nobodys_fault(tmp_path):
    config = RouterConfig(routing_policy="round_robin", max_rescues=0, retry_budget=0.0)
    async with fleet(tmp_path, config=config) as f:
        f.replicas[0].draining = True  # and the router does not know it yet
        for name in "xyz":
            sink = f.submit(make_request(name))
            await until(lambda sink=sink: sink.ended)
            check(sink, make_request(name))
            assert sink.flight.num_rescues == 0
        assert all(replica.num_faults == 0 for replica in f.placer.router.status().replicas)


async def test_the_only_replica_dies_and_the_request_waits_for_its_next_life(tmp_path):
    async with fleet(tmp_path, 1) as f:
        (replica,) = f.replicas
        replica.trouble = once("die", position=5)
        request = make_request(max_tokens=LENGTH, n=2)
        sink = f.submit(request)
        await until(lambda: f.placer.router.status().num_queued)
        assert not f.dispatcher.ready(request.model)
        assert f.dispatcher.info(request.model) is not None
        await replica.restart()
        await until(lambda: sink.ended)
        check(sink, request)
        await f.quiet()


async def test_silence_is_given_up_and_the_stream_goes_on(tmp_path):
    config = RouterConfig(routing_policy="round_robin", replica_timeout_s=0.2)
    async with fleet(tmp_path, config=config) as f:
        beset(f.replicas, once("hang"))
        sink = f.submit(make_request())
        await until(lambda: sink.ended)
        check(sink, make_request())
        for replica in f.replicas:
            replica.samples.clear()


@pytest.mark.parametrize("begun", [False, True])
async def test_hand_over_moves_what_runs_and_stops_it_where_it_was(tmp_path, begun):
    async with fleet(tmp_path) as f:
        request = make_request(max_tokens=200, n=2)
        if not begun:
            for replica in f.replicas:
                replica.paused = True
        sink = f.submit(request)
        await until(lambda: len(sink.outputs) > 3 if begun else any(r.submits for r in f.replicas))
        old = f.on(sink.flight)
        leaving = msgspec.structs.replace(old.endpoint, draining=True, hand_over=True)
        f.placer.set_endpoint(leaving)
        f.placer.set_endpoint(leaving)  # told twice, done once
        new = f.on(sink.flight)
        assert new is not old
        for replica in f.replicas:
            replica.resume()
        await until(lambda: sink.ended)
        check(sink, request)
        assert sink.flight.num_rescues == 1
        assert [abort.request_id for abort in old.aborts] == ["r"]
        assert len(new.submits) == (2 if begun else 1)
        await f.quiet()


async def test_what_is_on_its_way_when_a_request_leaves_and_comes_back_is_not_counted_twice(tmp_path):
    async with fleet(tmp_path, config=RouterConfig(routing_policy="round_robin", max_rescues=16)) as f:
        request = make_request(max_tokens=200)
        sink = f.submit(request)

        def there_and_back(outputs):
            if len(sink.tokens()) not in (5, 20, 40):
                return
            for _ in range(2):
                endpoint = f.on(sink.flight).endpoint
                f.placer.set_endpoint(msgspec.structs.replace(endpoint, draining=True, hand_over=True))
                f.placer.set_endpoint(endpoint)

        sink.after = there_and_back
        await until(lambda: sink.ended)
        check(sink, request)
        assert sink.flight.num_rescues == 6
        await f.quiet()


async def test_with_no_move_left_a_request_stays_where_it_is(tmp_path):
    config = RouterConfig(routing_policy="round_robin", max_rescues=0)
    async with fleet(tmp_path, config=config) as f:
        sink = f.submit(make_request())
        old = f.on(sink.flight)
        f.placer.set_endpoint(msgspec.structs.replace(old.endpoint, draining=True, hand_over=True))
        await until(lambda: sink.ended)
        check(sink, make_request())
        assert f.on(sink.flight) is old


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_every_request_ends_once_and_right(tmp_path, seed):
    """Deaths, faults, hand-overs, removals and aborts at random, over replicas that keep coming back."""
    random = Random(seed)
    config = RouterConfig(max_rescues=1000, retry_budget=1.0)
    async with fleet(tmp_path, 3, config=config) as f:
        kinds = ["die", "garbage", "half", "fail", "stop"]
        beset(f.replicas, lambda *_: random.choice(kinds) if random.random() < 0.004 else None)
        left = [
            make_request(str(i), seed=i, prompt=random.randint(1, 40), n=random.choice([1, 1, 1, 2, 4]),
                         max_tokens=random.randint(1, 40))
            for i in range(120)
        ]  # fmt: skip
        requests = {request.request_id: request for request in left}
        sinks = {}
        aborted: set[str] = set()
        while left or not all(sink.ended for sink in sinks.values()):
            for _ in range(min(len(left), random.randint(0, 4))):
                request = left.pop()
                sinks[request.request_id] = f.submit(request)
            replica = random.choice(f.replicas)
            draining = msgspec.structs.replace(replica.endpoint, draining=True)
            event = random.random()
            if replica._server is None or replica.hangs:
                await replica.restart()
            elif event < 0.04:
                f.placer.set_endpoint(msgspec.structs.replace(draining, hand_over=True))
            elif event < 0.06:
                f.placer.remove_endpoint(replica.replica_id)
            elif event < 0.1:
                f.placer.set_endpoint(draining)
            elif event < 0.2:
                f.placer.set_endpoint(replica.endpoint)
            elif event < 0.25 and (running := [n for n, sink in sinks.items() if not sink.ended]):
                name = random.choice(running)
                sinks[name].flight.abort()
                sinks[name].deaf = True
                aborted.add(name)
            await asyncio.sleep(0)
            if not left:
                for replica in f.replicas:
                    f.placer.set_endpoint(replica.endpoint)
                await asyncio.sleep(0.001)
        for name, sink in sinks.items():
            if name in aborted:
                for sample in range(requests[name].sampling.n):
                    received = sink.tokens(sample)
                    assert received == expected(requests[name], sample, len(received))
            else:
                check(sink, requests[name])
        assert sum(sink.flight.num_rescues for sink in sinks.values()) > 10
        await f.quiet()
