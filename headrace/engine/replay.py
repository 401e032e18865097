"""A recorded answer, computed again and compared to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headrace.core.errors import RecordError
from headrace.core.recording import (
    OTHER_MODEL,
    OTHER_PACK,
    AnswerRecord,
    RecordedRequest,
    RecordedSample,
    bits_float,
    float_bits,
)
from headrace.core.request import Request, pack_tokens
from headrace.engine.engine import Engine


@dataclass(frozen=True)
class Difference:
    """The first position of a sample's output at which the replay is another: a token and the bits of its
    log-probability, as recorded and as they came now. ``now`` None: the output ended before it."""

    request_id: str
    sample_index: int
    position: int
    recorded: tuple[int, int]
    now: tuple[int, int] | None

    def __str__(self) -> str:
        where = f"{self.request_id}, sample {self.sample_index}, token {self.position}"
        token, bits = self.recorded
        if self.now is None:
            return f"{where}: recorded token {token}, now the output ends before it"
        now_token, now_bits = self.now
        both = f"log-probability {_shown(bits)}, now {_shown(now_bits)}"
        if token != now_token:
            return f"{where}: recorded token {token}, now {now_token} ({both})"
        return f"{where}: the same token {token}, other bits: {both}"


def check_origin(engine: Engine, record: AnswerRecord) -> list[str]:
    """What is different here and may explain other bits, in words. Raises RecordError where the weights or
    the kernels are not those of the record."""
    origin = record.origins[0]
    here = engine.origin
    for name, what in (
        ("revision", "revision"),
        ("pack", "pack"),
        ("dtype", "dtype"),
        ("form", "form of weights"),  # which follows from the others
    ):
        then, now = getattr(origin, name), getattr(here, name)
        if then != now and name == "pack":
            raise RecordError(
                f"the record was made with {_pack(then)}, here runs {_pack(now)}",
                hint="name the folder of that pack: --pack",
                code=OTHER_PACK,
            )
        if then != now:
            raise RecordError(
                f"the record is of a model with {what} {then or 'plain'!r}, this one's is {now or 'plain'!r}",
                hint="replay it with the model that was served: --model",
                code=OTHER_MODEL,
            )
    notes = [
        f"{what} was {getattr(origin, name)!r}, is {getattr(here, name)!r}"
        for name, what in (("hardware", "hardware"), ("version", "headrace's version"), ("torch", "torch's"))
        if getattr(origin, name) != getattr(here, name)
    ]
    if not here.batch_invariant:
        notes.append(f"{_pack(here.pack)} does not promise the same bits in other batches")
    return notes


def replay(engine: Engine, record: AnswerRecord) -> Difference | None:
    """Computes each prompt of an answer, alone; the first difference, None: there is none."""
    for number, request in enumerate(record.requests):
        found = _run(engine, f"replay-{number}", request)
        for index, (sample, now) in enumerate(zip(request.samples, found, strict=True)):
            difference = _compare(request.request_id, index, sample, now)
            if difference is not None:
                return difference
    return None


def _run(engine: Engine, name: str, recorded: RecordedRequest) -> list[list[tuple[int, int]]]:
    """Tokens and bits of each sample, as many as were recorded."""
    wanted = [len(sample.token_ids) for sample in recorded.samples]
    sampling = msgspec.structs.replace(
        recorded.sampling,
        # a stop string ended it in the gateway, before the limit
        max_tokens=max([1, recorded.sampling.min_tokens, *wanted]),
        prompt_logprobs=None,
    )
    found: list[list[tuple[int, int]]] = [[] for _ in recorded.samples]
    engine.add(Request(request_id=name, prompt=pack_tokens(recorded.prompt), sampling=sampling, record=True))
    try:
        while engine.has_work and any(len(f) < w for f, w in zip(found, wanted, strict=True)):
            result = engine.step()
            for failed in result.failed:
                raise failed.to_error()
            for output in result.outputs:
                bits = [float_bits(entry.logprob) for entry in output.logprobs or []]
                found[output.sample_index] += zip(output.token_ids, bits, strict=True)
            engine.take_events()
    finally:
        engine.abort(name)
    return found


def _compare(
    request_id: str, index: int, recorded: RecordedSample, now: list[tuple[int, int]]
) -> Difference | None:
    pairs = list(zip(recorded.token_ids, recorded.logprob_bits, strict=True))
    for position, pair in enumerate(pairs):
        if position >= len(now) or now[position] != pair:
            other = now[position] if position < len(now) else None
            return Difference(request_id, index, position, pair, other)
    return None


def _shown(bits: int) -> str:
    return f"{bits_float(bits):.9g} (0x{bits:08x})"


def _pack(pack_id: str) -> str:
    return f"pack {pack_id[:12]}" if pack_id else "stock operators"
