"""Packs: what is refused, and a decoder that runs on one."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.core.errors import CompileError, PackError
from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.native.op import NativeKernel, make_op
from headrace.kernels.native.pack import load_pack
from headrace.kernels.native.store import WeightStore
from headrace.kernels.table import OpTable
from headrace.models.config import DecoderConfig, DecoderShape, RopeSpec
from headrace.models.decoder import Decoder
from tests.kernels.native.conftest import SOURCES
from tests.kernels.native.layers import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, make_weights

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=2,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=256,
    norm_eps=1e-5,
    attention_scale=0.3,
    ropes=(RopeSpec("default", 1e4, HEAD_DIM),),
    layer_ropes=(0, 0),
    sliding_windows=(None, None),
)

WritePack = Callable[..., Path]


def make_decoder(ops: OpTable, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    weights = make_weights("llama", dtype, ops)
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    return Decoder(
        CONFIG,
        ops,
        embedding=embedding,
        layers=weights.layers,
        final_norm=weights.final_norm,
        head=weights.head,
    )


@pytest.fixture
def write_pack(tmp_path: Path) -> WritePack:
    """Writes a pack of kernels from ``sources`` (decoder_layer and logits_head unless told)."""

    def write(*kernels: KernelEntry, conditions: PackConditions | None = None, **changes: Any) -> Path:
        folder = tmp_path / "pack"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "kernels" / "one").mkdir(parents=True)
        chosen = kernels or tuple(
            KernelEntry(op=op, source=f"kernels/one/{op}.cpp", max_rows=4)
            for op in ("decoder_layer", "logits_head")
        )
        for name in {"plain.h"} | {entry.source.rpartition("/")[2] for entry in chosen}:
            shutil.copyfile(SOURCES / name, folder / "kernels" / "one" / name)
        files = {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*.*")
        }
        fields: dict[str, Any] = {
            "format": 1,
            "name": "some",
            "kind": "kernels",
            "kernels": list(chosen),
            "conditions": conditions or PackConditions(shapes=DecoderShape.of(CONFIG).as_dict()),
            "author": "tests",
            "round_id": "r1",
            "licence": "Apache-2.0",
            "created": "2026-01-01T00:00:00Z",
            "files": files,
        }
        manifest = PackManifest(**(fields | changes))
        (folder / "pack.json").write_bytes(msgspec.json.encode(manifest))
        return folder

    return write


def load(folder: Path, decoder: object, base: OpTable, **options: Any) -> OpTable:
    return load_pack(folder, base, decoder, build_folder=folder.parent / "built", **options)


@pytest.mark.usefixtures("compiler")
def test_a_decoder_computes_the_same_on_a_pack(write_pack: WritePack) -> None:
    """Decodes in the kernels, a prefill in the ops beneath; prepared in another thread meanwhile."""
    stock = OpTable.stock("cpu", torch.bfloat16)
    decoder = make_decoder(stock)
    folder = write_pack()
    tables: list[OpTable] = []
    thread = threading.Thread(target=lambda: tables.append(load(folder, decoder, stock)))
    thread.start()
    thread.join()
    (table,) = tables
    pack_id = hashlib.sha256((folder / "pack.json").read_bytes()).hexdigest()
    assert {op for op, source in table.provenance.items() if source == pack_id} == {
        "decoder_layer",
        "logits_head",
    }
    assert table.nbytes > 0 and stock.nbytes == 0
    ours, theirs = generate(decoder, table), generate(decoder, stock)
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert float((mine - expected).abs().max()) < 0.05 * float(expected.abs().max()), step
    assert not any(torch.equal(mine, expected) for mine, expected in zip(ours[1:], theirs[1:], strict=True))


def generate(decoder: Decoder, ops: OpTable) -> list[torch.Tensor]:
    """Logits of a prefill of two sequences and of three decode steps after it."""
    decoder.ops = ops
    kv = [LayerKV.allocate(20, 16, KV_HEADS, HEAD_DIM) for _ in range(2)]
    lengths, found = [0, 0], []
    with torch.inference_mode():
        for new in (20, 1, 1, 1):
            entries = [
                BatchEntry(length, new, range(10 * n + 1, 10 * n + 10)) for n, length in enumerate(lengths)
            ]
            batch = AttentionBatch.build(entries, 16)
            token_ids = (batch.positions * 7 + 3) % VOCAB
            hidden = decoder.forward(token_ids, batch, kv)
            found.append(decoder.logits(hidden[-1:]))
            lengths = [length + new for length in lengths]
    return found


@pytest.mark.usefixtures("compiler")
def test_of_two_kernels_for_one_op_the_last_is_asked_first(write_pack: WritePack) -> None:
    entry = KernelEntry(op="linear", source="kernels/one/linear.cpp", max_rows=8)
    narrow = KernelEntry(op="linear", source="kernels/one/packed_linear.cpp", max_rows=2)
    base = OpTable.reference()
    decoder = make_decoder(base)
    table = load(write_pack(entry, narrow), decoder, base)
    op: Any = table.unbound("linear")
    assert op.entry == narrow and op._fallback.entry == entry
    packed = decoder.weights.layers[0].mlp.down
    for rows in (1, 5, 9):
        x = torch.randn(rows, INNER, generator=torch.Generator().manual_seed(1))
        assert torch.allclose(table.linear(x, packed), base.linear(x, packed), atol=1e-4)


@pytest.mark.usefixtures("compiler")
def test_the_example_of_the_docs(build_text: Callable[[str], NativeKernel]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    kernel = build_text(text.partition("```cpp\n")[2].partition("```")[0])
    decoder = make_decoder(OpTable.stock("cpu", torch.bfloat16))
    base = OpTable.reference()
    entry = KernelEntry(op="linear", source="linear.cpp", max_rows=4, activation_dtypes=["float32"])
    op = make_op(kernel, entry, never)
    op.prepare(decoder.weights, WeightStore())
    for packed in (decoder.weights.layers[0].mlp.down, decoder.weights.layers[1].attention.qkv):
        x, more = torch.randn(3, packed.in_features), torch.randn(3, packed.out_features)
        for residual in (more, None):
            assert torch.allclose(op(x, packed, residual), base.linear(x, packed, residual), atol=1e-4)


def never(*arguments: Any) -> torch.Tensor:
    raise AssertionError("fell through")


def test_damaged_packs_are_refused(write_pack: WritePack, tmp_path: Path) -> None:
    base = OpTable.reference()
    decoder = make_decoder(base)
    folder = write_pack()
    source = folder / "kernels" / "one" / "decoder_layer.cpp"
    source.write_text(source.read_text() + "// changed\n")
    with pytest.raises(PackError, match=r"decoder_layer\.cpp is not the one that was judged") as caught:
        load(folder, decoder, base)
    assert caught.value.code == "pack_refused"
    source.unlink()
    with pytest.raises(PackError, match="missing"):
        load(folder, decoder, base)
    source.symlink_to(SOURCES / "decoder_layer.cpp")
    with pytest.raises(PackError, match="no plain file"):
        load(folder, decoder, base)
    with pytest.raises(PackError, match=r"no file 'kernels/one/linear\.cpp'"):
        load(write_pack(KernelEntry(op="linear", source="kernels/one/linear.cpp"), files={}), decoder, base)
    with pytest.raises(PackError, match="no path inside the pack"):
        load(write_pack(files={"../x.cpp": "0"}), decoder, base)
    (folder / "pack.json").write_text("{}")
    with pytest.raises(PackError, match=r"pack\.json"):
        load(folder, decoder, base)
    with pytest.raises(PackError, match="is no pack"):
        load(tmp_path / "nowhere", decoder, base)
    with pytest.raises(PackError, match="format 2"):
        load(write_pack(format=2), decoder, base)


def test_packs_for_other_machines_and_models_are_refused(write_pack: WritePack) -> None:
    base = OpTable.reference()
    decoder = make_decoder(base)
    shapes = DecoderShape.of(CONFIG).as_dict()
    for conditions, message in (
        (PackConditions(cpu_features=["avx1024"]), "CPU features that are not here: avx1024"),
        (PackConditions(device="cuda"), "device cuda"),
        (PackConditions(dtype="float32"), "for float32 weights, the model's are bfloat16"),
        (PackConditions(shapes=shapes | {"hidden_size": 64}), "hidden_size is 64, this model's is 48"),
        (PackConditions(shapes={"experts": 8}), "experts is 8, this model's is unknown"),
    ):
        with pytest.raises(PackError, match=message):
            load(write_pack(conditions=conditions), decoder, base)
    int8 = make_decoder(OpTable.stock("cpu", torch.bfloat16, "int8"))
    with pytest.raises(PackError, match="the model's are int8"):
        load(write_pack(), int8, base)
    with pytest.raises(PackError, match="Transformers' definition"):
        load(write_pack(), object(), base)


@pytest.mark.usefixtures("compiler")
def test_refused_by_trust_or_by_the_compiler(write_pack: WritePack) -> None:
    base = OpTable.reference()
    decoder = make_decoder(base)

    def refuse(folder: Path) -> None:
        raise PackError("signed by nobody")

    folder = write_pack(KernelEntry(op="linear", source="kernels/one/broken.cpp"))
    with pytest.raises(PackError, match="signed by nobody"):
        load(folder, decoder, base, trusted=refuse)
    with pytest.raises(CompileError, match=r"broken\.cpp does not compile"):
        load(folder, decoder, base)
    assert not list((folder.parent / "built").iterdir())
    linear = KernelEntry(op="linear", source="kernels/one/linear.cpp", weight_formats=["float32"])
    with pytest.raises(PackError, match="covers none"):
        load(write_pack(linear), decoder, base)
