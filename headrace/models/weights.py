"""A checkpoint's tensors by name, over one or many safetensors files.

Tensors are views of memory-mapped files, so that loading needs room for one copy of the weights and a
layer's worth beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from headrace.core.errors import CorruptFileError, UnsupportedModelError
from headrace.kernels.blocks import buffer_formats, check_buffer, count_elements
from headrace.models.safetensors_file import SafetensorsFile
from headrace.models.weight_files import weight_files

_FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """The safetensors of one model folder.

    ``take`` hands out each tensor, checked; ``finish`` complains about those nobody took.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelNotFoundError when files are missing, CorruptFileError when one is damaged."""
        self.folder = folder
        self.files = [SafetensorsFile(path) for path in weight_files(folder)]
        owners: dict[str, SafetensorsFile] = {}
        for file in self.files:
            for name in file.entries:
                if name in owners:
                    raise CorruptFileError(f"{folder}: tensor {name} is in two files")
                owners[name] = file
        self._owners = owners
        self._taken: set[str] = set()
        self.taken_bytes = 0
        self.shapes = MappingProxyType({name: owners[name].entries[name].shape for name in owners})

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.end - entry.begin for file in self.files for entry in file.entries.values())

    @property
    def num_elements(self) -> int:
        """Numbers in all tensors together."""
        return sum(self.elements(name) for name in self.shapes)

    def elements(self, name: str) -> int:
        """Numbers in one tensor; for blocks, what they stand for."""
        if self.holds_blocks(name):
            return count_elements(self._owners[name].get(name))
        return math.prod(self.shapes[name])

    def stored_bytes(self, name: str) -> int:
        entry = self._owners[name].entries[name]
        return entry.end - entry.begin

    def holds_blocks(self, name: str) -> bool:
        """Whether a name is there and stands for a buffer of quantized blocks."""
        file = self._owners.get(name)
        return file is not None and file.entries[name].dtype == "U8" and len(file.entries[name].shape) == 1

    def formats(self, name: str) -> list[str]:
        """Those of a buffer's blocks."""
        return buffer_formats(self._owners[name].get(name))

    def take_blocks(self, name: str, rows: Sequence[int], in_features: int) -> Tensor:
        """A buffer of blocks as a view of the file: weights of these rows below each other.

        Raises CorruptFileError when it does not hold exactly these.
        """
        entry = self._owners[name].entries[name]
        buffer = self._owners[name].get(name)
        wrong = check_buffer(buffer, rows, in_features)
        if wrong:
            raise CorruptFileError(
                f"{self.folder}: the blocks of {name}: {wrong}", hint="remove the folder; it is made again"
            )
        if name not in self._taken:
            self._taken.add(name)
            self.taken_bytes += entry.end - entry.begin
        return buffer

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in its stored type, as a view of the file.

        Raises CorruptFileError when it is missing or has another shape, UnsupportedModelError when it
        holds no plain floating-point numbers.
        """
        file = self._owners.get(name)
        if file is None:
            raise CorruptFileError(
                f"{self.folder}: tensor {name} of shape {list(shape)} is missing",
                hint="config.json and the weights do not belong together, or the download is incomplete",
            )
        entry = file.entries[name]
        if entry.shape != shape:
            raise CorruptFileError(
                f"{self.folder}: tensor {name} has shape {list(entry.shape)}, "
                f"config.json asks for {list(shape)}",
                hint="config.json and the weights do not belong together",
            )
        if entry.dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{self.folder}: tensor {name} is stored as {entry.dtype}; "
                "float32, float16 or bfloat16 is needed",
                hint="use the original checkpoint with --quantization int8, or a GGUF file",
            )
        self._taken.add(name)
        self.taken_bytes += entry.end - entry.begin
        return file.get(name)

    def alike(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same numbers; the second then counts as taken."""
        one, two = (self._owners[each].get(each) for each in (name, other))
        same = one.shape == two.shape and one.dtype is two.dtype and torch.equal(one, two)
        if same:
            self._taken.add(other)
        return same

    def copy(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """``take``, as a tensor of its own."""
        return self.take(name, shape).to(device=device, dtype=dtype, copy=True)

    def join(
        self,
        parts: Iterable[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Several tensors one below the other, as one tensor of its own."""
        views = [self.take(name, shape) for name, shape in parts]
        rows = sum(view.shape[0] for view in views)
        joined = torch.empty((rows, *views[0].shape[1:]), dtype=dtype, device=device)
        start = 0
        for view in views:
            joined[start : start + view.shape[0]] = view
            start += view.shape[0]
        return joined

    def release(self) -> None:
        """Gives back the memory of pages read so far."""
        for file in self.files:
            file.release()

    def finish(self, *, ignore_prefixes: tuple[str, ...] = (), ignore_suffixes: tuple[str, ...] = ()) -> None:
        """Raises UnsupportedModelError when tensors were not taken: without them it is another model."""
        left = sorted(
            name
            for name in self._owners.keys() - self._taken
            if not name.startswith(ignore_prefixes) and not name.endswith(ignore_suffixes)
        )
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise UnsupportedModelError(
                f"{self.folder}: the weights hold tensors that this architecture has no place for: "
                f"{', '.join(left[:5])}{more}",
                hint="config.json may name the wrong model_type",
            )


def weights_revision(folder: Path, files: Iterable[SafetensorsFile]) -> str:
    """What identifies the weights of a folder that nothing else names: a digest over config.json, headers
    and samples of every tensor, the same wherever the folder lies."""
    state = sha256((folder / "config.json").read_bytes())
    for file in files:
        state.update(file.path.name.encode())
        state.update(file.digest())
    return state.hexdigest()
