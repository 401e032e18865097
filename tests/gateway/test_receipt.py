"""Receipts: asked for by a header, true of the request, and parts that add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.knobs import RouterConfig
from headrace.core.messages import Timing
from headrace.gateway.receipt import PARTS, waterfall
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call

BODY = {"messages": [{"role": "user", "content": "hi"}]}
ASK = {"x-headrace-receipt": "1", "x-request-id": "mine-7"}
SECONDS = st.floats(min_value=-0.01, max_value=1e4, allow_nan=False)


def check(receipt: dict) -> None:
    parts = receipt["waterfall_ms"]
    assert set(parts) == {*PARTS, "total"}
    assert all(value >= 0 for value in parts.values())
    assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"], abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_whole_answers(stack, path):
    stack.replica.num_cached_tokens = 3
    stack.replica.timing = Timing(0.0, 0.00001, 5)
    answer = call(stack, path, {**BODY, "prompt": "hi"} if path != CHAT else BODY, headers=ASK).json
    receipt = answer["receipt"]
    check(receipt)
    assert receipt["request_id"] == "mine-7"
    assert receipt["replica"] == "fake-0"
    assert (receipt["attempts"], receipt["rescues"]) == (1, 0)
    prompt = stack.replica.requests[0].num_prompt_tokens
    output = answer["usage"]["completion_tokens"]
    assert receipt["tokens"] == {
        "prompt": prompt,
        "cached": 3,
        "from_disk": 0,
        "fetched": 0,
        "computed": prompt - 3,
        "output": output,
    }
    assert receipt["prefill_replica"] is None
    assert receipt["waterfall_ms"]["fill"] == 0
    assert receipt["waterfall_ms"]["prefill"] == 0.01
    assert receipt["waterfall_ms"]["decode"] > 0
    assert receipt["ttft_ms"]["actual"] > 0
    assert receipt["ttft_ms"]["predicted"] >= 0


@pytest.mark.parametrize("value", ["1", "true", "True"])
def test_streams_get_a_chunk_of_its_own(stack, value):
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    events = call(stack, CHAT, body, headers={"x-headrace-receipt": value}).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["usage"]
    assert events[-3]["choices"] == [] and events[-3]["id"] == events[0]["id"]
    check(events[-3]["receipt"])
    assert all("receipt" not in event for event in events[:-3])


@pytest.mark.parametrize("headers", [{}, {"x-headrace-receipt": "0"}])
def test_nobody_else_gets_one(stack, headers):
    assert "receipt" not in call(stack, CHAT, BODY, headers=headers).json
    assert b"receipt" not in call(stack, CHAT, {**BODY, "stream": True}, headers=headers).body


def test_of_several_prompts_and_samples(stack):
    answer = call(stack, "/v1/completions", {"prompt": ["one", "two three"], "n": 2}, headers=ASK).json
    check(answer["receipt"])
    assert answer["receipt"]["tokens"]["output"] == answer["usage"]["completion_tokens"]
    assert answer["receipt"]["tokens"]["prompt"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("die_after", [0, 2])
def test_after_a_rescue(tokenizer, tmp_path, die_after):
    with Stack(tokenizer, tmp_path, router=RouterConfig(), num_replicas=2) as stack:
        died = []

        def plan(request):
            died.append(request)
            return Plan(tokens=[5, 6, 7, 8], die_after=die_after if len(died) == 1 else None)

        stack.plan(plan)
        receipt = call(stack, CHAT, BODY, headers=ASK).json["receipt"]
        check(receipt)
        assert (receipt["attempts"], receipt["rescues"]) == (2, 1)
        assert receipt["tokens"]["output"] == 5


def test_blocks_from_elsewhere_have_a_part_of_their_own(stack):
    stack.replica.num_cached_tokens = 2
    stack.replica.timing = Timing(0.0, 1e-5, 5, 2e-5, 3, 1)
    answer = call(stack, CHAT, BODY, headers=ASK).json
    receipt = answer["receipt"]
    check(receipt)
    assert (receipt["waterfall_ms"]["fill"], receipt["waterfall_ms"]["prefill"]) == (0.02, 0.01)
    tokens = receipt["tokens"]
    assert (tokens["cached"], tokens["from_disk"], tokens["fetched"]) == (2, 1, 3)
    assert tokens["cached"] + tokens["fetched"] + tokens["computed"] == tokens["prompt"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2, (
        "what was fetched was computed for it"
    )


@given(*[SECONDS] * 7, st.floats(min_value=0, max_value=1e4, allow_nan=False))
def test_parts_add_up_whatever_the_clocks_say(text, route, before, queue, fill, prefill, decode, total):
    parts = waterfall(
        100.0,
        text_s=text,
        route_s=route,
        before_s=before,
        queue_s=queue,
        fill_s=fill,
        prefill_s=prefill,
        decode_s=decode,
        end=100.0 + total,
    )
    check({"waterfall_ms": parts})
