"""A GGUF file's copy with its matrices in another type, so that llama.cpp runs the weights that we run."""

from __future__ import annotations

import os
from pathlib import Path

_FILE_TYPES = {"BF16": 32, "Q8_0": 7}


def gguf_copy(source: Path, target: Path, kind: str) -> Path:
    """Writes ``target`` once, atomically: matrices as BF16 or Q8_0, vectors as F32, the rest as it was."""
    if target.exists():
        return target
    import gguf
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(partial, str(architecture))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            stored = GGMLQuantizationType[kind]
            writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)
    return target


def matrix_bytes(source: Path) -> int:
    """Bytes of a file's tensors."""
    from gguf import GGUFReader

    return sum(int(tensor.n_bytes) for tensor in GGUFReader(source).tensors)
