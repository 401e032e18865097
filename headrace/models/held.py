"""In which form each matrix of a model is held: the table's own, or one that a pack's kernels read.

    pack_formats has          stored as             held as
    nothing                   numbers, or blocks    what the table packs (blocks become numbers first)
    the numbers' dtype        numbers               as they lie in the file, mapped
    the blocks' formats       blocks                as they lie in the file, mapped
    q8_0, with int8 asked     anything              Q8_0 blocks, made now

With a pack the kernels make a form of their own from these, which is then what steps read: what is mapped
costs no memory that the system could not take back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.kernels.blocks import dense_rows, join_blocks, part_rows, quantize_blocks, read_parts
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear, blocks_linear, mapped_linear, plain_linear
from headrace.models.weight_files import joined_name
from headrace.models.weights import Checkpoint

_MADE = "q8_0"


@dataclass(frozen=True)
class Form:
    """What was asked for. ``pack_formats``: what the kernels of a pack that computes whole steps read
    weights in; empty: there is no such pack. ``quantization``: auto, none or int8."""

    dtype: torch.dtype
    quantization: str = "none"
    pack_formats: frozenset[str] = frozenset()

    @property
    def mapped(self) -> bool:
        """Whether weights that need no change stay in the file's pages."""
        asked = self.quantization != "int8" or self.makes_blocks
        return asked and self.dtype_name in self.pack_formats

    @property
    def makes_blocks(self) -> bool:
        return self.quantization == "int8" and _MADE in self.pack_formats

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def name(self, kept_formats: Collection[str]) -> str:
        """What became of the weights' numbers, for the identity of keys and values: of other numbers they are
        others. Empty: they are of the dtype."""
        if self.quantization == "int8":
            return "int8 blocks" if self.makes_blocks else "int8"
        return f"blocks {'+'.join(sorted(kept_formats))}" if kept_formats else ""

    def keeps(self, formats: Sequence[str]) -> bool:
        """Whether blocks of these formats stay as they are."""
        if self.quantization == "none" or (self.makes_blocks and set(formats) != {_MADE}):
            return False
        return self.pack_formats >= set(formats)


@dataclass
class WeightHolder:
    """Takes matrices out of a checkpoint. ``mapped_bytes``: of those that stay in the file's pages;
    ``kept_formats``: of the blocks that were kept or made."""

    checkpoint: Checkpoint
    ops: OpTable
    form: Form
    device: torch.device
    mapped_bytes: int = 0
    kept_formats: set[str] = field(default_factory=set)

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        few_rows: bool = False,
    ) -> PackedLinear:
        """The named weights of so many rows as one, rows below rows."""
        blocks = self._blocks(parts, in_features)
        if blocks is not None:
            return blocks_linear(blocks, in_features, bias, dtype=self.form.dtype)
        if self.form.mapped and not self._is_blocks(parts):
            views = [self.checkpoint.take(name, (rows, in_features)) for name, rows in parts]
            if all(view.dtype is self.form.dtype for view in views):
                self.mapped_bytes += sum(view.nbytes for view in views)
                return mapped_linear(views, bias)
            return plain_linear(torch.cat([view.to(self.form.dtype) for view in views]), bias)
        dense = self._dense(parts, in_features)
        if self.form.mapped:
            return plain_linear(dense, bias)
        return self.ops.pack_linear(dense, bias, gated=gated, few_rows=few_rows)

    def embedding(self, name: str, rows: int, in_features: int) -> Tensor | PackedLinear:
        """A table to look rows up in."""
        parts = [(name, rows)]
        blocks = self._blocks(parts, in_features)
        if blocks is not None:
            return blocks_linear(blocks, in_features, dtype=self.form.dtype)
        if self.form.mapped and not self._is_blocks(parts):
            view = self.checkpoint.take(name, (rows, in_features))
            if view.dtype is self.form.dtype:
                self.mapped_bytes += view.nbytes
                return view
        return self._dense(parts, in_features)

    def head_of(self, embedding: Tensor | PackedLinear) -> PackedLinear:
        """The output head that shares the embedding's numbers."""
        if isinstance(embedding, PackedLinear):
            return embedding
        if self.form.mapped:
            return plain_linear(embedding)
        return self.ops.pack_linear(embedding, few_rows=True)

    def _is_blocks(self, parts: Sequence[tuple[str, int]]) -> bool:
        return self.checkpoint.holds_blocks(joined_name([name for name, _ in parts]))

    def _stored_blocks(self, parts: Sequence[tuple[str, int]], in_features: int) -> Tensor:
        name = joined_name([name for name, _ in parts])
        return self.checkpoint.take_blocks(name, [rows for _, rows in parts], in_features)

    def _blocks(self, parts: Sequence[tuple[str, int]], in_features: int) -> Tensor | None:
        """The weight as a buffer of blocks, kept or made; None: it is to be numbers."""
        form = self.form
        if self._is_blocks(parts):
            buffer = self._stored_blocks(parts, in_features)
            formats = [part.format for part in read_parts(buffer)]
            if form.keeps(formats):
                self.mapped_bytes += buffer.nbytes
                self.kept_formats |= set(formats)
                return buffer
        if not form.makes_blocks or in_features % 32:
            return None
        self.kept_formats.add(_MADE)
        made = [(_MADE, quantize_blocks(weight)) for weight in self._weights(parts, in_features)]
        return join_blocks(made, in_features)

    def _weights(self, parts: Sequence[tuple[str, int]], in_features: int) -> list[Tensor]:
        """Each weight as numbers, in float32 where it is blocks."""
        if not self._is_blocks(parts):
            return [self.checkpoint.take(name, (rows, in_features)) for name, rows in parts]
        buffer = self._stored_blocks(parts, in_features)
        return [
            dense_rows(part_rows(buffer, part, in_features), part.format, torch.float32)
            for part in read_parts(buffer)
        ]

    def _dense(self, parts: Sequence[tuple[str, int]], in_features: int) -> Tensor:
        """One tensor of its own, in the dtype that was asked for."""
        dtype = self.form.dtype
        if not self._is_blocks(parts):
            shapes = [(name, (rows, in_features)) for name, rows in parts]
            return self.checkpoint.join(shapes, dtype, self.device)
        buffer = self._stored_blocks(parts, in_features)
        rows = [
            dense_rows(part_rows(buffer, part, in_features), part.format, dtype)
            for part in read_parts(buffer)
        ]
        return torch.cat(rows).to(self.device)


def needed_bytes(checkpoint: Checkpoint, form: Form) -> int:
    """Memory that the weights will take, about: with a pack what its kernels make of them."""
    if form.quantization == "int8" and not form.makes_blocks:
        return checkpoint.num_elements
    total = 0
    for name in checkpoint.shapes:
        elements = checkpoint.elements(name)
        if form.makes_blocks:
            total += 2 * (elements // 32 * 34)  # the blocks, and the kernels' form of them
        elif checkpoint.holds_blocks(name) and form.keeps(checkpoint.formats(name)):
            total += checkpoint.stored_bytes(name)
        else:
            total += elements * form.dtype.itemsize
    return total
