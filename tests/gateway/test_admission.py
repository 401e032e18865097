"""Permits: a full gateway says so at the door, and each permit comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.core.errors import InvalidRequestError, OverloadedError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.admission import Admission
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call, chat, complete, open_request

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def small(tokenizer, tmp_path):
    config = GatewayConfig(port=0, max_concurrent_requests=3, shutdown_grace_s=0.5)
    with Stack(tokenizer, tmp_path, config) as stack:
        yield stack


def test_a_flood_gets_429_and_the_admitted_finish(small):
    small.plan(lambda request: Plan(silent=True))
    held = [open_request(small, CHAT, {"messages": HI}) for _ in range(3)]
    small.wait_for(lambda: len(small.replica.running) == 3, "full")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat(small), range(24)))
    assert [answer.status for answer in answers] == [429] * 24
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
    assert answers[0].error["type"] == "rate_limit_error"
    assert "--max-concurrent-requests" in answers[0].error["message"]
    assert len(small.replica.requests) == 3
    assert call(small, "/health").status == 200
    assert (
        b'headrace_http_errors_total{status="429",type="rate_limit_error"} 24.0'
        in call(small, "/metrics").body
    )
    for sock in held:
        sock.close()
    small.wait_for(lambda: not small.replica.running, "aborted")
    small.answer("fine")
    assert [chat(small).status for _ in range(6)] == [200] * 6


def test_each_prompt_of_a_list_needs_a_permit(small):
    small.plan(lambda request: Plan(silent=True))
    sock = open_request(small, CHAT, {"messages": HI})
    small.wait_for(lambda: small.replica.running, "one inside")
    assert complete(small, prompt=["one", "two", "three"]).status == 429
    assert complete(small, prompt=["one"] * 4).status == 400
    sock.close()
    small.wait_for(lambda: not small.replica.running, "aborted")
    small.answer("fine")
    assert complete(small, prompt=["one", "two", "three"]).status == 200
    assert complete(small, prompt=["one", "two", "three"]).status == 200


def test_each_sample_needs_a_permit(small):
    inside = small.client
    for ask in (chat, complete):
        refused = ask(small, n=4)
        assert refused.status == 400 and refused.error["param"] == "n"
        assert "--max-concurrent-requests" in refused.error["message"]
    assert complete(small, prompt=["a", "b"], n=2).status == 400
    small.plan(lambda request: Plan(silent=True))
    sock = open_request(small, CHAT, {"messages": HI, "n": 2})
    small.wait_for(lambda: small.replica.running, "two inside")
    for ask in (chat, complete):
        busy = ask(small, n=2)
        assert busy.status == 429 and int(busy.headers["retry-after"]) >= 1
    sock.close()
    small.wait_for(lambda: not small.replica.running and not inside.num_open, "aborted")
    small.plan(lambda request: Plan(die_after=0))
    assert chat(small, n=3).status == 503
    small.wait_for(lambda: inside.alive, "connected again")
    small.answer("fine")
    for stream in (False, True):  # all three permits are back each time
        assert chat(small, n=3, stream=stream).status == 200
        assert complete(small, n=3, stream=stream).status == 200


@pytest.mark.parametrize("body", [b"{", b'{"messages": []}', b'{"messages": [], "tools": [1]}'])
def test_permits_come_back_after_errors(small, body):
    assert [call(small, CHAT, body).status for _ in range(5)] == [400] * 5
    small.answer("fine")
    assert chat(small).status == 200


def test_counting():
    admission = Admission(2)
    admission.take(2)
    with pytest.raises(OverloadedError):
        admission.take()
    admission.give(1, 300.0)
    admission.take()
    with pytest.raises(OverloadedError) as refused:
        admission.take()
    assert 1 <= refused.value.retry_after <= 60
    assert admission.num_refused == 2
    with pytest.raises(InvalidRequestError):
        admission.check(3)
    admission.give(2, 1.0)
    assert admission.in_use == 0
