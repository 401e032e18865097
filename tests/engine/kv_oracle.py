"""A model and a KV cache made of hashes: it notices every key and value that is not what it should be.

A "key" at a position is the digest of all tokens up to it, which is what real keys depend on. The next
token is a function of that digest, so a sample's output must be the same however it was scheduled.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.engine.schedule import Schedule
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence

EOS = 0


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    num_output_tokens: int = 0,
    block_ids: bytes = b"",
    sample_index: int = 0,
    **sampling: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        block_ids=block_ids,
        num_output_tokens=num_output_tokens,
        sample_index=sample_index,
    )


def digests(tokens: array[int] | list[int]) -> list[bytes]:
    """One digest a position, of all tokens up to it."""
    digest, result = b"", []
    for token in tokens:
        digest = blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
        result.append(digest)
    return result


def next_token(digest: bytes, sample_index: int, vocab_size: int) -> int:
    return blake2b(digest, digest_size=4, salt=bytes([sample_index])).digest()[0] % vocab_size


def expected_output(
    request: Request, sample_index: int, *, vocab_size: int, max_model_len: int
) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop token of one sample that runs alone, by the rules as told to users."""
    sampling, tokens = request.sampling, list(request.token_ids())
    num_prompt = len(tokens) - request.num_output_tokens
    while True:
        token = next_token(digests(tokens)[-1], sample_index, vocab_size)
        tokens.append(token)
        count = len(tokens) - num_prompt
        stops = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if stops and count >= sampling.min_tokens:
            return tokens[num_prompt:], "stop", token
        if count == sampling.max_tokens or len(tokens) == max_model_len:
            return tokens[num_prompt:], "length", None


class KVOracle:
    """Runs schedules on a cache of digests."""

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.cache: dict[int, bytes] = {}  # slot → digest

    def execute(self, schedule: Schedule) -> list[int]:
        """Writes each chunk's keys, then reads all before them; returns the sampled tokens."""
        block_size = self.scheduler.config.block_size
        for sequence, count, _ in schedule.entries:
            start = sequence.num_computed_tokens
            for position, digest in enumerate(digests(sequence.tokens)[: start + count]):
                if position >= start:
                    self.cache[self.slot(sequence, position, block_size)] = digest
        sampled = []
        for sequence, count, samples in schedule.entries:
            end = sequence.num_computed_tokens + count
            expected = digests(sequence.tokens)
            found = [self.cache.get(self.slot(sequence, p, block_size)) for p in range(end)]
            assert found == expected[:end], f"{sequence} reads keys that are not its own"
            assert samples == (end == sequence.num_tokens and not sequence.prefill_only)
            if samples:
                sampled.append(next_token(expected[-1], sequence.sample_index, self.vocab_size))
        return sampled

    def slot(self, sequence: Sequence, position: int, block_size: int) -> int:
        return sequence.block_table[position // block_size] * block_size + position % block_size

    def step(self) -> tuple[Schedule, list[Sequence]]:
        schedule = self.scheduler.schedule()
        finished = self.scheduler.update(schedule, self.execute(schedule))
        self.scheduler.check_integrity()
        return schedule, finished
