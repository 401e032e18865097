"""packs/cpu's decoder layer: near float64 in every family, and a row's bits its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.models.decoder import Decoder
from tests.models.tiny import FAMILIES, VOCAB
from tests.packs.pack import Packed, load_tiny, write_pack

BLOCK_SIZE = 16
STEPS = {
    "decodes": ((40, 1), (3, 1), (0, 1), (170, 1)),
    "one decode": ((300, 1),),
    "mixed": ((40, 1), (0, 1), (21, 7), (0, 200), (130, 33)),
    "chunk": ((0, 150),),
}
# sizes that are no multiples of anything, more heads than key heads in odd numbers
ODD = {"hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("packs") / "cpu")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_near_float64(family: str, pack: Path, built: Path, tmp_path: Path) -> None:
    check_layers(load_tiny(family, tmp_path, pack, built))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "family, sizes",
    [
        ("llama_bias", {**ODD, "head_dim": 40}),
        ("qwen3", {**ODD, "head_dim": 128}),
        ("gemma3", {**ODD, "head_dim": 256}),
        ("olmo2", {**ODD, "num_key_value_heads": 6}),
        ("phi3", {**ODD, "hidden_size": 576, "num_key_value_heads": 1}),
    ],
)
def test_odd_sizes(family: str, sizes: dict[str, int], pack: Path, built: Path, tmp_path: Path) -> None:
    check_layers(load_tiny(family, tmp_path, pack, built, num_hidden_layers=2, **extra(family), **sizes))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["llama_bias", "gemma2"])
def test_layers_on_blocks_are_near_float64(family: str, pack: Path, built: Path, tmp_path: Path) -> None:
    """Weights as they are in the blocks; what is lost is activations rounded to 8 bits."""
    sizes = {"head_dim": 32}
    check_layers(load_tiny(family, tmp_path, pack, built, quantization="int8", **sizes), more=0.03)


def extra(family: str) -> dict[str, object]:
    kinds = {"gemma3": ["sliding_attention", "full_attention"]}
    return {"layer_types": kinds[family]} if family in kinds else {}


def check_layers(packed: Packed, more: float = 0.002) -> None:
    """Every layer on its own, from the same rows: the kernel errs no more than torch's operators do, but for
    ``more``."""
    for name, entries in STEPS.items():
        step = LayerStep.random(packed.stock, entries)
        for index in range(packed.stock.config.num_layers):
            expected, expected_kv = step.layer(packed.wide, index, torch.float64)
            out, kv = step.layer(packed.stock, index, torch.float32, packed.table)
            other, _ = step.layer(packed.stock, index, torch.bfloat16)
            ours, stock = error(out, expected), error(other, expected)
            assert ours < 1.5 * stock + more, (name, index, ours, stock)
            slots = step.batch.slot_mapping
            for mine, right in ((kv.keys, expected_kv.keys), (kv.values, expected_kv.values)):
                assert error(mine[:, slots], right[:, slots]) < 0.02 + more, (name, index)
                untouched = torch.ones(mine.shape[1], dtype=torch.bool)
                untouched[slots] = False
                assert torch.equal(mine[:, untouched].double(), right[:, untouched])


def error(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    return float((out.double() - expected).abs().max() / expected.abs().max())


@dataclass
class LayerStep:
    """One step's rows for any layer of a decoder, over caches that hold random keys and values."""

    batch: AttentionBatch
    num_blocks: int
    x: Tensor

    @classmethod
    def random(cls, decoder: Decoder, entries: tuple[tuple[int, int], ...]) -> LayerStep:
        counts = [-(-sum(entry) // BLOCK_SIZE) for entry in entries]
        blocks = list(range(1, sum(counts) + 1))
        random.Random(0).shuffle(blocks)
        made = []
        for (context, new), count in zip(entries, counts, strict=True):
            made.append(BatchEntry(context, new, [blocks.pop() for _ in range(count)]))
        batch = AttentionBatch.build(made, BLOCK_SIZE)
        x = torch.randn(batch.num_tokens, decoder.config.hidden_size, generator=seeded(1))
        return cls(batch, sum(counts) + 1, x.bfloat16().float())

    @torch.inference_mode()
    def layer(
        self, decoder: Decoder, index: int, dtype: torch.dtype, table: object = None
    ) -> tuple[Tensor, LayerKV]:
        wide = dtype is torch.float64
        spec = decoder.config.kv_specs[index]
        kv = LayerKV.allocate(
            self.num_blocks, BLOCK_SIZE, *spec, dtype=torch.float64 if wide else torch.bfloat16
        )
        for seed, cache in enumerate((kv.keys, kv.values)):
            cache.copy_(torch.randn(cache.shape, generator=seeded(seed)).bfloat16())
        rope = decoder._ropes[decoder.config.layer_ropes[index]]
        cos, sin = (angle.to(dtype) for angle in rope.cos_sin(self.batch.positions, torch.float32))
        ops = table or decoder.ops
        out = ops.decoder_layer(self.x.to(dtype), decoder.weights.layers[index], cos, sin, kv, self.batch)
        return out, kv


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- a row's bits are its own ----


@dataclass
class Sequence:
    """Tokens that are given, not chosen, so that every way of computing them sees the same."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.tokens

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


def sequences(lengths: tuple[int, ...], seed: int = 1) -> list[Sequence]:
    generator = seeded(seed)
    return [Sequence(torch.randint(2, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


class Runner:
    """Computes parts of sequences in steps as they are told."""

    def __init__(self, packed: Packed, seed: int = 0, num_blocks: int = 512) -> None:
        self.decoder = packed.stock
        self.decoder.ops = packed.table
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.kv = [LayerKV.allocate(num_blocks, BLOCK_SIZE, *spec) for spec in self.decoder.config.kv_specs]
        for cache in self.kv:
            cache.keys.fill_(1e3)
            cache.values.fill_(1e3)

    @torch.inference_mode()
    def step(self, parts: list[tuple[Sequence, int]]) -> None:
        parts = sorted(parts, key=lambda part: part[1] != 1)
        entries, token_ids = [], []
        for sequence, count in parts:
            end = sequence.done + count
            while len(sequence.blocks) * BLOCK_SIZE < end:
                sequence.blocks.append(self.free.pop())
            entries.append(BatchEntry(sequence.done, count, sequence.blocks))
            token_ids += sequence.tokens[sequence.done : end]
            sequence.done = end
        hidden = self.decoder.forward(
            torch.tensor(token_ids), AttentionBatch.build(entries, BLOCK_SIZE), self.kv
        )
        logits = self.decoder.logits(hidden)
        start = 0
        for sequence, count in parts:
            sequence.hidden.append(hidden[start : start + count])
            sequence.logits.append(logits[start : start + count])
            start += count

    def run(self, given: list[Sequence], chunk: int, decodes: int = 1 << 20) -> list[Sequence]:
        """All sequences, ``chunk`` tokens of one of them beside ``decodes`` single tokens of others."""
        while pending := [sequence for sequence in given if sequence.left]:
            parts = [(pending[0], min(chunk, pending[0].left))]
            parts += [(sequence, 1) for sequence in pending[1 : 1 + decodes]]
            self.step(parts)
        return given


def same(ours: list[Sequence], theirs: list[Sequence], what: object) -> None:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name in ("hidden", "logits"):
            a, b = torch.cat(getattr(mine, name)), torch.cat(getattr(other, name))
            rows = (a != b).any(1).nonzero().flatten().tolist()
            assert not rows, (what, name, index, rows[:8], float((a - b).abs().max()))


LENGTHS = (150, 1, 33, 260, 90)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "family", ["llama", "llama_bias", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"]
)
def test_a_rows_bits_do_not_depend_on_its_step(family: str, pack: Path, built: Path, tmp_path: Path) -> None:
    packed = load_tiny(family, tmp_path, pack, built)
    whole = sequences(LENGTHS)
    for sequence in whole:
        Runner(packed).step([(sequence, sequence.left)])
    together = sequences(LENGTHS)
    Runner(packed, seed=1).step([(sequence, sequence.left) for sequence in together])
    same(together, whole, "together")
    for chunk, decodes in ((1, 0), (7, 0), (64, 2), (129, 4), (1, 4)):
        given = sequences(LENGTHS)
        same(Runner(packed, seed=chunk).run(given, chunk, decodes), whole, (chunk, decodes))


@pytest.mark.usefixtures("two_threads")
def test_a_rows_bits_are_its_own_on_blocks(pack: Path, built: Path, tmp_path: Path) -> None:
    packed = load_tiny("llama", tmp_path, pack, built, quantization="int8")
    whole = sequences(LENGTHS)
    for sequence in whole:
        Runner(packed).step([(sequence, sequence.left)])
    for chunk, decodes in ((7, 0), (129, 4), (1, 4)):
        given = sequences(LENGTHS)
        same(Runner(packed, seed=chunk).run(given, chunk, decodes), whole, (chunk, decodes))


@pytest.mark.usefixtures("two_threads")
def test_a_rows_bits_do_not_depend_on_threads(pack: Path, built: Path, tmp_path: Path) -> None:
    packed = load_tiny("qwen3", tmp_path, pack, built)
    whole = sequences((300, 40))
    Runner(packed).step([(sequence, sequence.left) for sequence in whole])
    for threads in (1, 3, 5, 16):
        torch.set_num_threads(threads)
        given = sequences((300, 40))
        same(Runner(packed).run(given, 100, 1), whole, threads)


@pytest.mark.usefixtures("two_threads")
def test_many_decodes_beside_a_chunk(pack: Path, built: Path, tmp_path: Path) -> None:
    """1, 8, 33 and 64 sequences that decode, alone and beside a prompt."""
    packed = load_tiny("llama", tmp_path, pack, built)
    lengths = tuple(20 + 3 * index for index in range(64))
    whole = sequences(lengths)
    Runner(packed).step([(sequence, sequence.left) for sequence in whole])
    for count, beside in itertools.product((1, 8, 33, 63), (False, True)):
        given = sequences(lengths)
        runner = Runner(packed, seed=count)
        runner.step([(sequence, sequence.left - 4) for sequence in given[:count]])
        for _ in range(4):
            rest = given[-1]
            extra = [(rest, min(50, rest.left))] if beside and rest.left else []
            runner.step([(sequence, 1) for sequence in given[:count]] + extra)
        same(given[:count], whole[:count], (count, beside))
