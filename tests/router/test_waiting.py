from __future__ import annotations

from headrace.core.routing import Route
from headrace.router.waiting import Waiter, Waiting


def route(
    name: str, tier: str = "standard", *, model: str = "m", text: bool = False, attempt: int = 0
) -> Route:
    return Route(
        request_id=name, model=model, num_prompt_tokens=10, tier=tier, text_only=text, attempt=attempt
    )


def names(waiting: Waiting, model: str = "m", text: bool = False) -> list[str]:
    return [waiter.route.request_id for waiter in waiting.line((model, text))]


def test_tiers_go_in_order_and_each_is_first_come_first_served() -> None:
    waiting = Waiting()
    for name, tier in (("b", "batch"), ("s1", "standard"), ("f", "flex"), ("s2", "what"), ("p", "priority")):
        waiting.add(Waiter(route(name, tier), 0.0))
    waiting.add(Waiter(route("r", "batch", attempt=1), 0.0))
    assert names(waiting) == ["r", "p", "s1", "s2", "f", "b"]


def test_lines_are_apart_by_model_and_by_text() -> None:
    waiting = Waiting()
    waiting.add(Waiter(route("one"), 0.0))
    waiting.add(Waiter(route("two", model="other"), 0.0))
    waiting.add(Waiter(route("three", text=True), 0.0))
    assert names(waiting) == ["one"]
    assert names(waiting, "other") == ["two"]
    assert names(waiting, text=True) == ["three"]
    assert len(waiting) == 3
    assert not waiting.is_ahead(route("new", model="third"))


def test_whom_one_may_overtake() -> None:
    waiting = Waiting()
    waiting.add(Waiter(route("flex", "flex"), 0.0))
    assert waiting.is_ahead(route("x", "batch"))
    assert waiting.is_ahead(route("x", "flex"))
    assert not waiting.is_ahead(route("x", "standard"))
    assert not waiting.is_ahead(route("x", "batch", attempt=2))


def test_who_left_is_gone_from_everywhere() -> None:
    waiting = Waiting()
    waiting.add(Waiter(route("one"), 0.0))
    assert "one" in waiting
    assert waiting.remove("one") is not None
    assert waiting.remove("one") is None
    assert not waiting
    assert waiting.line_keys() == []
    assert not waiting.is_ahead(route("x"))
