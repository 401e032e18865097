"""Text mode through the whole gateway: what users of other routers complained about."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from headrace.core.knobs import RouterConfig
from headrace.gateway import passthrough
from tests.router.external.front import Front, finished, text_servers
from tests.router.external.stand_in import Exchange, until


@pytest.fixture
async def servers():
    async with text_servers("a", "b") as servers:
        yield servers


@pytest.fixture
async def front(servers):
    async with Front(*servers) as front:
        await front.up()
        yield front


@pytest.fixture
async def alone():
    """One server behind a gateway."""
    async with text_servers("a") as servers, Front(*servers) as front:
        await front.up()
        yield front, servers[0]


def replica(front, name):
    (found,) = [
        status
        for status in front.placer.router.status().replicas
        if status.member.endpoint.replica_id == name
    ]
    return found


async def test_a_stream_passes_as_it_is(alone):
    front, server = alone
    answer = await front.ask(stream=True, stream_options={"include_usage": True}, anything={"goes": [1]})
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-engine"] == "stand-in", "the server's own headers go on"
    assert answer.headers["x-request-id"] != "theirs", "but for the id, which is ours"
    assert answer.texts == ["a0", "a1", "a2", "a3"]
    assert answer.events[-2]["usage"]["completion_tokens"] == 4, "the usage chunk passes through"
    assert answer.events[-1] == "[DONE]"
    sent = server.asked[0]
    assert sent.json["anything"] == {"goes": [1]}
    assert sent.headers["x-request-id"] == answer.headers["x-request-id"]
    assert front.num_leases() == 0


async def test_usage_chunks_are_not_invented(alone):
    front, _ = alone
    answer = await front.ask(stream=True)
    assert not [event for event in answer.events if isinstance(event, dict) and "usage" in event]


async def test_whole_answers_and_completions_pass(alone):
    front, _ = alone
    answer = await front.ask()
    assert answer.status == 200 and json.loads(answer.body)["usage"]["prompt_tokens"] == 11
    assert int(answer.headers["content-length"]) == len(answer.body)
    answer = await front.ask("/v1/completions", prompt="hello", stream=True)
    assert answer.texts[0] == "a0"
    metrics = front.metrics
    assert (
        metrics.finished["length"] == 2 and metrics.prompt_tokens == 11 and metrics.cached_prompt_tokens == 3
    )
    assert metrics.generation_tokens >= 8 and sum(metrics.time_to_first_token.counts) == 1


async def test_the_body_is_untouched_but_for_a_model_of_another_name(alone):
    front, server = alone
    raw = b'{ "model":"m" , "messages":[{"content":"\\u00e4"}],  "x":1.50, "y":12345678901234567890 }'
    await finished(front.send_raw(raw))
    assert server.asked[-1].body == raw
    await finished(front.send_raw(raw.replace(b'"m"', b'"alias"')))
    sent = server.asked[-1].body
    assert json.loads(sent)["model"] == "m"
    assert b"1.50" in sent and b"12345678901234567890" in sent and b"\\u00e4" in sent


async def test_the_caller_key_is_not_given_away(alone):
    front, server = alone
    await front.ask(headers=[(b"authorization", b"Bearer callers-own"), (b"traceparent", b"00-1-2-03")])
    sent = server.asked[-1].headers
    assert "authorization" not in sent and sent["traceparent"] == "00-1-2-03"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "no valid JSON"),
        (b"[]", "expected `object`"),
        (b'{"messages": 5}', "messages"),
        (b'{"model": "other", "messages": []}', "not served"),
    ],
)
async def test_bad_bodies_end_at_the_door(alone, body, words):
    front, server = alone
    answer = front.send_raw(body)
    await finished(answer)
    assert answer.status in (400, 404) and words in answer.error["message"]
    assert not server.asked


async def test_a_4xx_storm_passes_through_and_opens_no_breaker(alone):
    front, server = alone
    server.status = 422
    answers = await asyncio.gather(*(front.ask(stream=True) for _ in range(40)))
    assert {answer.status for answer in answers} == {422}
    assert answers[0].error["message"] == "no, says a"
    assert replica(front, "a").breaker == "closed" and replica(front, "a").num_faults == 0
    server.status = 200
    assert (await front.ask(stream=True)).texts


async def test_one_server_answering_500_is_left_out_and_nobody_sees_it(servers):
    async with Front(*servers, config=RouterConfig(retry_budget=1.0)) as front:
        await front.up()
        servers[0].status = 500
        for turn in range(10):
            texts = [f"{turn} {number} " * 99 for number in range(8)]
            asks = [front.ask(messages=[{"role": "user", "content": text}], stream=True) for text in texts]
            answers = await asyncio.gather(*asks)
            assert [answer.texts[0] for answer in answers] == ["b0"] * 8
            if replica(front, "a").breaker != "closed":
                break
        assert replica(front, "a").breaker == "open" and replica(front, "a").num_faults > 0
        num_asked = len(servers[0].asked)
        assert num_asked > 0
        for _ in range(5):
            await front.ask(stream=True)
        assert len(servers[0].asked) == num_asked, "an open breaker asks nothing"


async def test_a_500_with_nowhere_else_to_go_is_an_error_with_its_words(alone):
    front, server = alone
    server.status = 500
    answer = await front.ask(stream=True)
    assert answer.status == 500 and "no, says a" in answer.error["message"]


@pytest.mark.parametrize("die", [0, 2])
@pytest.mark.parametrize("half_event", [False, True])
async def test_a_dying_server(front, servers, die, half_event):
    """Before the first event another one answers; after it the stream ends with a whole error event."""
    for server in servers:
        server.half_event = half_event
    servers[0].die = servers[1].die = die
    first = await front.ask(stream=True)
    if die == 0:
        assert first.status == 503 and "not finished" in first.error["message"]
        assert len(servers[0].asked) >= 1 and len(servers[1].asked) >= 1, "both were tried"
    else:
        assert first.status == 200 and len(first.texts) == 2
        assert first.events[-1]["error"]["type"] == "service_unavailable"
        assert "[DONE]" not in first.events
    assert front.num_leases() == 0


def send_pieces(server, *, ending: bytes, num_pieces: int, piece_bytes: int, begun: bool = False) -> None:
    """The server streams one long event in pieces."""

    async def answer(exchange: Exchange) -> None:
        exchange.start_stream()
        if begun:
            exchange.event({"choices": [{"delta": {"content": "a"}}]})
        exchange.chunk(b'data: {"x": "')
        for _ in range(num_pieces):
            if exchange.gone.is_set():
                return
            exchange.chunk(b"x" * piece_bytes)
            await exchange._writer.drain()
            await asyncio.sleep(0)
        for byte in ending:  # a cut at every place of it
            exchange.chunk(bytes([byte]))
            await exchange._writer.drain()
            await asyncio.sleep(0.002)
        exchange.end_stream()

    server.post("/v1/chat/completions", answer)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_a_long_event_in_many_pieces_costs_no_more_than_its_length(alone, end):
    front, server = alone
    send_pieces(server, ending=b'"}' + end, num_pieces=3000, piece_bytes=4096)
    began = time.process_time()
    answer = await front.ask(stream=True)
    seconds = time.process_time() - began
    long, done = answer.body.replace(end, b"\n\n").removesuffix(b"\n\n").split(b"\n\n")
    assert len(json.loads(long[6:])["x"]) == 3000 * 4096 and done == b"data: [DONE]"
    assert seconds < 5.0


@pytest.mark.parametrize("begun", [False, True])
async def test_an_event_without_end_is_a_fault_of_the_server(front, servers, begun, monkeypatch):
    """Before the first whole event another server answers; after it an event of our own is the last."""
    monkeypatch.setattr(passthrough, "MAX_EVENT_BYTES", 100_000)
    for server in servers[: 2 if begun else 1]:
        send_pieces(server, ending=b"", num_pieces=1000, piece_bytes=1000, begun=begun)
    answers = [await front.ask(stream=True) for _ in range(4)]
    assert all(answer.status == 200 and answer.failure is None for answer in answers)
    for answer in answers:
        if begun:
            assert answer.texts == ["a"] and "more than 100000 bytes" in answer.events[-1]["error"]["message"]
        else:
            assert answer.texts == ["b0", "b1", "b2", "b3"]
    assert servers[0].asked
    assert front.num_leases() == 0


async def test_an_event_without_end_and_nowhere_else_to_go_is_an_error(alone, monkeypatch):
    monkeypatch.setattr(passthrough, "MAX_EVENT_BYTES", 100_000)
    front, server = alone
    send_pieces(server, ending=b"", num_pieces=1000, piece_bytes=1000)
    answer = await front.ask(stream=True)
    assert answer.status == 500 and "more than 100000 bytes" in answer.error["message"]


async def test_the_next_server_answers_where_the_first_died_before_its_first_event(front, servers):
    servers[0].die = 0
    servers[1].hold = None
    for _ in range(4):
        answer = await front.ask(stream=True)
        assert answer.texts == ["b0", "b1", "b2", "b3"]


async def test_a_whole_answer_that_breaks_is_tried_elsewhere(front, servers):
    async def half(exchange: Exchange) -> None:
        exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await exchange._writer.drain()
        exchange.reset()

    servers[0].post("/v1/chat/completions", half)
    for _ in range(3):
        answer = await front.ask()
        assert answer.status == 200 and json.loads(answer.body)["object"] == "chat.completion"


@pytest.mark.parametrize("hold", [0, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_reaches_the_server_in_prefill_and_in_decode(alone, hold, stream):
    front, server = alone
    server.hold = hold if stream else 0
    answer = front.send(stream=stream)
    await until(lambda: server.asked and (not stream or server.num_sent >= hold))
    answer.call.abort()
    await until(lambda: server.num_gone == 1)
    await until(lambda: front.num_leases() == 0)
    assert front.metrics.finished["abort"] == 1
    assert replica(front, "a").breaker == "closed"


async def test_a_disconnect_in_the_queue_never_reaches_the_server():
    async with text_servers("a") as (server,), Front(server, max_in_flight=1) as front:
        await front.up()
        server.hold = 1
        first = front.send(stream=True)
        await until(lambda: server.num_sent == 1)
        queued = front.send(stream=True)
        await until(lambda: front.placer.router.status().num_queued == 1)
        queued.call.abort()
        await until(lambda: front.placer.router.status().num_queued == 0)
        server.released.set()
        await finished(first)
        assert len(server.asked) == 1
        assert (await front.ask(stream=True)).texts


async def test_a_server_that_is_down_at_start_is_served_without_and_taken_later(servers):
    await servers[0].stop()
    async with Front(*servers) as front:
        await front.up(1)
        for _ in range(3):
            assert (await front.ask(stream=True)).texts[0] == "b0"
        assert replica(front, "a").member.state == "down"
        await servers[0].__aenter__()
        await front.up(2)


async def test_no_server_at_all_is_a_503(servers):
    for server in servers:
        await server.stop()
    async with Front(*servers) as front:
        answer = await front.ask(stream=True)
        assert answer.status == 503 and answer.headers["retry-after"]
        for server in servers:
            await server.__aenter__()


def raw_request(front, body: dict) -> socket.socket:
    """A caller that sends and does not read."""
    sock = socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2])))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    data = json.dumps(body).encode()
    sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    return sock


async def test_a_slow_reader_holds_the_server_and_not_the_gateways_memory(alone):
    front, server = alone
    server.num_chunks, server.chunk_bytes = 2000, 32768  # 64 MB
    sock = raw_request(front, {"model": "m", "messages": [], "stream": True})
    before = -1
    while before != server.num_sent or not server.num_sent:
        before = server.num_sent
        await asyncio.sleep(0.1)
    assert server.num_sent < 1000
    sock.setblocking(False)
    data = b""
    loop = asyncio.get_running_loop()
    while not data.endswith(b"0\r\n\r\n"):
        data = data[-5:] + await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10)
    assert server.num_sent == 2000
    sock.close()


async def test_a_reader_that_stops_for_too_long_is_ended_and_the_server_with_it(alone, monkeypatch):
    monkeypatch.setattr(passthrough, "STALL_S", 0.2)
    front, server = alone
    server.num_chunks, server.chunk_bytes = 5000, 32768
    sock = raw_request(front, {"model": "m", "messages": [], "stream": True})
    await until(lambda: server.asked and server.asked[0].gone.is_set())
    await until(lambda: front.num_leases() == 0)
    assert replica(front, "a").breaker == "closed" and replica(front, "a").num_faults == 0
    sock.close()


async def test_a_conversation_comes_back_to_where_its_text_was(front, servers):
    """Keyed by text: turn N is a prefix of turn N + 1."""
    turns = [{"role": "user", "content": "tell me a long story " * 60}]
    await front.ask(messages=turns)
    home = next(server for server in servers if server.asked)
    for turn in range(6):
        turns = [
            *turns,
            {"role": "assistant", "content": f"answer {turn} " * 40},
            {"role": "user", "content": "on " * 30},
        ]
        await front.ask(messages=turns)
    assert len(home.asked) == 7
    decisions = await front.placer.why((home.asked[-1].headers)["x-request-id"])
    assert decisions and decisions[0].candidates
    chosen = [each for each in decisions[0].candidates if each.replica_id == home.name]
    assert chosen[0].num_cached_tokens > 0


async def test_shutting_down_ends_what_is_open_with_an_event(servers):
    async with Front(servers[0]) as front:
        await front.up()
        servers[0].hold = 2
        answer = front.send(stream=True)
        await until(lambda: servers[0].num_sent == 2 and answer.body)
        front._stop.set()
        async with asyncio.timeout(10):
            await answer.done.wait()
        assert answer.failure is None and "error" in answer.events[-1]


async def test_retries_stay_within_their_budget(servers):
    """A fleet that fails everything is not asked max_rescues times for every request."""
    async with Front(*servers, config=RouterConfig(retry_budget=0.0, queue_timeout_s=0.05)) as front:
        await front.up()
        for server in servers:
            server.status = 500
        for _ in range(20):
            await front.ask(stream=True)
        assert sum(len(server.asked) for server in servers) < 40


def test_turns_share_their_keys():
    class Caller:
        request_id = b"id"
        headers: list = []

        def new_id(self):
            return "x"

    from headrace.core.routing import ModelInfo

    info = ModelInfo(model="m", max_model_len=1, block_size=64, root_identity=b"r" * 32, tokens=False)
    first = [{"role": "user", "content": "x" * 900}]
    second = [*first, {"role": "assistant", "content": "y" * 900}]

    def keys(messages, **fields):
        body = passthrough.read_body(json.dumps({"messages": messages, **fields}).encode())
        return passthrough.route_of(body, "m", info, Caller()).block_ids

    assert len(keys(first)) == 32 * ((len(json.dumps(first)) - 2) // 256)
    assert keys(second).startswith(keys(first)) and keys(second) != keys(first)
    tools = [{"type": "function", "function": {"name": "f" * 300}}]
    assert not keys(second, tools=tools).startswith(keys(first)[:32])
