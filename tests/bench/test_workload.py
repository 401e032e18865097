from __future__ import annotations

import random

from headrace.bench.workload import conversation, text_of_length, token_prompts


def words(text: str) -> int:
    return len(text.split())


def test_the_same_seed_gives_the_same_work() -> None:
    first = conversation(random.Random(3), 3000, 200, words)
    assert first == conversation(random.Random(3), 3000, 200, words)
    assert first != conversation(random.Random(4), 3000, 200, words)


def test_prompts_share_no_prefix_and_stay_inside_the_vocabulary() -> None:
    prompts = token_prompts(random.Random(0), 32, 64, 49152)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 32
    assert all(len(prompt) == 64 for prompt in prompts)
    assert all(1000 <= token < 48152 for prompt in prompts for token in prompt)
    assert all(0 <= token < 40 for token in token_prompts(random.Random(0), 1, 200, 40)[0])


def test_text_is_as_long_as_asked_and_varied() -> None:
    text = text_of_length(random.Random(1), 5000, words)
    assert 4700 <= words(text) <= 5000
    assert "```" in text and "\n\n" in text and len(set(text.split())) > 200


def test_conversations_alternate_and_end_with_the_user() -> None:
    messages = conversation(random.Random(2), 10_000, 500, words)
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + [
        "user"
    ]
    assert 8500 <= sum(words(message["content"]) for message in messages) <= 10_000
