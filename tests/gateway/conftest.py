from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.text.tokenizer import Tokenizer
from tests.gateway.door import Door
from tests.gateway.tiny import Stack, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def shared_stack(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tokenizer, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Stack:
    """The running gateway, its replica back to answering plainly."""
    shared_stack.answer("The capital of France is Paris.")
    shared_stack.replica.interval = 0.001
    shared_stack.replica.num_cached_tokens = 0
    shared_stack.replica.requests.clear()
    shared_stack.replica.aborts.clear()
    shared_stack.wait_for(lambda: shared_stack.client.alive, "replica connected")
    return shared_stack


@pytest.fixture(scope="session")
def shared_door() -> Iterator[Door]:
    with Door() as door:
        yield door


@pytest.fixture
def door(shared_door: Door) -> Door:
    """The HTTP server alone; what it has seen before is forgotten."""
    shared_door.forget()
    return shared_door
