"""Token mode through the whole gateway: rescue between servers, overflow to a server that takes text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from headrace.core.routing import Endpoint
from headrace.text.tokenizer import Tokenizer
from tests.gateway.tiny import write_tokenizer
from tests.router.external import engines
from tests.router.external.front import MODEL, Front, TextServer, finished
from tests.router.external.stand_in import StandIn, until


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def text(tokenizer):
    return "The capital of France is Paris, one two three."


def say(engine, tokenizer, text):
    """The engine goes on with ``text`` from wherever a prompt has got to in it."""
    tokens = tokenizer.encode(text, False).tolist()

    def answer(prompt, num, stops):
        for done in range(len(tokens), -1, -1):
            if done == 0 or prompt[-done:] == tokens[:done]:
                rest = tokens[done:][:num]
                return rest, "length", None
        raise AssertionError

    engine.answer = answer
    return tokens


def endpoint(server, replica_id, **fields):
    return Endpoint(replica_id=replica_id, model=MODEL, address=server.url, **fields)


@pytest.mark.parametrize("maker", [engines.vllm, engines.sglang, engines.tensorrt_llm])
@pytest.mark.parametrize("die", [0, 3])
async def test_a_stream_goes_on_elsewhere_with_each_token_once(tokenizer, text, maker, die):
    async with StandIn() as first, StandIn() as second:
        behind = [maker(first), engines.vllm(second)]
        tokens, _ = (say(engine, tokenizer, text) for engine in behind)
        others = [endpoint(first, "first"), endpoint(second, "second")]
        async with Front(tokenizer=tokenizer, others=others) as front:
            await front.up()
            behind[0].die = die
            for _ in range(6):
                answer = await front.ask(stream=True, max_tokens=len(tokens))
                assert answer.status == 200
                assert "".join(answer.texts) == text
                if behind[0].bodies:
                    break
                behind[0].die = die
            else:
                behind[1].die = die  # they all went to the other one
                answer = await front.ask(stream=True, max_tokens=len(tokens))
                assert "".join(answer.texts) == text
            assert sum(len(engine.bodies) for engine in behind) >= 2
            assert front.num_leases() == 0


async def test_cached_tokens_that_are_told_at_the_end_are_in_the_usage(tokenizer, text):
    async with StandIn() as server:
        engine = engines.vllm(server)
        say(engine, tokenizer, text)
        async with Front(tokenizer=tokenizer, others=[endpoint(server, "w")]) as front:
            await front.up()
            answer = await front.ask(max_tokens=4)
            assert (
                json.loads(answer.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
                == engine.num_cached
            )
            answer = await front.ask(max_tokens=4, stream=True, stream_options={"include_usage": True})
            usage = answer.events[-2]["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == engine.num_cached


async def test_a_disconnect_reaches_an_engine_that_takes_tokens(tokenizer, text):
    async with StandIn() as server:
        engine = engines.vllm(server)
        say(engine, tokenizer, text)
        engine.hold = 2
        async with Front(tokenizer=tokenizer, others=[endpoint(server, "w")]) as front:
            await front.up()
            answer = front.send(stream=True, max_tokens=50)
            await until(lambda: engine.bodies and answer.body)
            answer.call.abort()
            await until(lambda: engine.num_gone == 1)
            await until(lambda: front.num_leases() == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_overflow_gets_the_callers_own_body_while_the_others_are_full(tokenizer, text, stream):
    async with StandIn() as server, TextServer("hosted") as hosted:
        engine = engines.vllm(server)
        say(engine, tokenizer, text)
        engine.hold = 1
        others = [endpoint(server, "own", max_in_flight=1), endpoint(hosted, "hosted", overflow=True)]
        async with Front(tokenizer=tokenizer, others=others) as front:
            await front.up()
            first = front.send(stream=True, max_tokens=5)
            await until(lambda: engine.bodies)
            answer = await front.ask(stream=stream, stop=["never"], max_tokens=5)
            sent = hosted.asked[0].json
            assert sent["stop"] == ["never"] and sent["messages"] == [{"role": "user", "content": "hi"}]
            if stream:
                assert answer.texts == ["hosted0", "hosted1", "hosted2", "hosted3"]
            else:
                assert json.loads(answer.body)["object"] == "chat.completion"
            engine.released.set()
            await finished(first)
            assert front.num_leases() == 0
            await front.ask(max_tokens=2)
            assert len(hosted.asked) == 1, "only while the others are full"


async def test_overflow_that_fails_before_its_answer_waits_for_the_others(tokenizer, text):
    async with StandIn() as server, TextServer("hosted") as hosted:
        engine = engines.vllm(server)
        say(engine, tokenizer, text)
        engine.hold = 1
        hosted.status = 503
        others = [endpoint(server, "own", max_in_flight=1), endpoint(hosted, "hosted", overflow=True)]
        async with Front(tokenizer=tokenizer, others=others) as front:
            await front.up()
            first = front.send(stream=True, max_tokens=5)
            await until(lambda: engine.bodies)
            second = asyncio.ensure_future(front.ask(stream=True, max_tokens=5))
            await until(lambda: hosted.asked)
            engine.released.set()
            await finished(first)
            answer = await second
            assert answer.status == 200 and answer.texts and "hosted0" not in answer.texts


async def test_a_disconnect_reaches_the_overflow(tokenizer, text):
    async with StandIn() as server, TextServer("hosted") as hosted:
        engine = engines.vllm(server)
        say(engine, tokenizer, text)
        engine.hold = 1
        hosted.hold = 1
        others = [endpoint(server, "own", max_in_flight=1), endpoint(hosted, "hosted", overflow=True)]
        async with Front(tokenizer=tokenizer, others=others) as front:
            await front.up()
            first = front.send(stream=True, max_tokens=5)
            await until(lambda: engine.bodies)
            answer = front.send(stream=True)
            await until(lambda: hosted.num_sent == 1 and answer.body)
            answer.call.abort()
            await until(lambda: hosted.num_gone == 1)
            engine.released.set()
            await finished(first)
            assert front.num_leases() == 0
