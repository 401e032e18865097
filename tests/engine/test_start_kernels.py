"""Left to itself an engine takes the best pack that fits, says which, and never fails for another."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.core.errors import CompilerMissingError, PackError
from headrace.core.knobs import EngineConfig
from headrace.engine.engine import Engine
from headrace.kernels.native import build, shipped
from headrace.kernels.native.build import find_compiler
from headrace.kernels.native.coverage import describe_coverage, is_batch_invariant, native_ops
from headrace.kernels.native.pack import Packable
from headrace.optimize.keys import Keys
from tests.engine.harness import make_request, run
from tests.engine.shipped import PackShelf
from tests.kernels.native.conftest import SOURCES

PROMPT = [(7 * i) % 300 + 2 for i in range(20)]
Make = Callable[..., Engine]


@pytest.fixture
def shelf(tmp_path: Path) -> PackShelf:
    return PackShelf(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "kernels"


@pytest.fixture
def make(shelf: PackShelf, cache: Path, tiny: Callable[..., Path]) -> Make:
    def made(family: str = "llama", *, build_s: float = 300.0, **knobs: object) -> Engine:
        fields: dict[str, object] = {
            "dtype": "bfloat16",
            "device": "cpu",
            "threads": 1,
            "max_model_len": 64,
            "block_size": 4,
            "kv_cache_gib": 0.02,
        }
        config = EngineConfig(**{**fields, **knobs})  # type: ignore[arg-type]
        return Engine(config, tiny(family, dtype=torch.bfloat16), shipped=shelf.shipped(build_s=build_s))

    return made


@pytest.fixture(autouse=True)
def compiler() -> None:
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))


def serves(engine: Engine) -> None:
    """It answers, whatever runs."""
    results = run(engine, [make_request(str(i), PROMPT[i:], max_tokens=6) for i in range(3)])
    assert all(len(result.tokens) == 6 for result in results.values())


def use_compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is this script, which says its version."""
    path.write_text(f'#!/bin/sh\ncase "$*" in --version) echo mock 1.0; exit 0;; esac\n{script}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))


def test_the_pack_for_the_newest_cpu_comes_first(
    make: Make, shelf: PackShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "cpu_features", lambda: frozenset({"avx2", "fma", "avx512f", "avx512bw"}))
    monkeypatch.setattr("headrace.kernels.native.pack.cpu_features", shipped.cpu_features)
    old = shelf.add("cpu-avx2", features=["avx2", "fma"])
    new = shelf.add("cpu-avx512", features=["avx2", "avx512f", "avx512bw"])
    shelf.add("cpu-amx", features=["avx512f", "avx512bw", "amx_bf16", "avx2"])
    engine = make()
    assert engine.stats().pack == new
    assert engine.kernels == "kernels: cpu-avx512 (logits_head); cpu-amx: this CPU lacks amx_bf16"
    assert engine.kernels in engine.hello_fields["notes"]
    assert engine.hello_fields["pack_folder"] == str(shelf.folder / "cpu-avx512")
    serves(engine)
    monkeypatch.setattr(shipped, "cpu_features", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr("headrace.kernels.native.pack.cpu_features", shipped.cpu_features)
    engine = make()
    assert engine.stats().pack == old
    assert "cpu-avx512: this CPU lacks avx512bw, avx512f" in engine.kernels
    monkeypatch.setattr(shipped, "cpu_features", frozenset)
    engine = make()
    assert engine.stats().pack == "" and engine.kernels.startswith("kernels: stock operators: cpu-amx: this")
    serves(engine)


def test_none_and_a_folder_are_taken_at_their_word(make: Make, shelf: PackShelf) -> None:
    pack = shelf.add("cpu")
    engine = make(pack="none")
    assert (engine.stats().pack, engine.hello_fields["pack_folder"]) == ("", "")
    assert engine.kernels == "kernels: stock operators, as --pack none asks for"
    engine = make(pack=str(shelf.folder / "cpu"))
    assert engine.stats().pack == pack and engine.kernels == f"kernels: pack {pack[:12]} (logits_head)"
    (shelf.folder / "cpu" / "logits_head.cpp").write_text("")
    with pytest.raises(PackError, match="is not the one that was judged"):
        make(pack=str(shelf.folder / "cpu"))
    with pytest.raises(PackError, match="is no pack"):
        make(pack=str(shelf.folder / "nowhere"))


def test_nothing_ships(make: Make) -> None:
    engine = make()
    assert engine.kernels == "kernels: stock operators: none ships with this installation"
    serves(engine)


def test_packs_that_cannot_be_seen_are_not_none(make: Make, shelf: PackShelf) -> None:
    """Root may read every folder, so links to themselves stand in for those that it may not."""
    shelf.add("half")
    (shelf.folder / "half" / "pack.json").unlink()
    (shelf.folder / "loop").symlink_to("loop")
    (shelf.folder / "notes.txt").write_text("")
    engine = make()
    assert engine.kernels == (
        "kernels: stock operators: half: it is signed, and its pack.json is missing; "
        "loop: it cannot be read (Too many levels of symbolic links)"
    )
    serves(engine)
    shutil.rmtree(shelf.folder)
    shelf.folder.write_text("")
    engine = make()
    assert (
        "stock operators: " in engine.kernels and "packs cannot be read (Not a directory)" in engine.kernels
    )
    serves(engine)


def test_what_is_not_as_it_was_signed_is_passed_over(make: Make, shelf: PackShelf, tmp_path: Path) -> None:
    shelf.add("edited", features=[])
    (shelf.folder / "edited" / "logits_head.cpp").write_text("// evil\n")
    shelf.add("foreign", keys=Keys(tmp_path / "others"))
    shelf.add("unsigned")
    (shelf.folder / "unsigned" / "signature.json").unlink()
    shelf.add("garbled")
    (shelf.folder / "garbled" / "pack.json").write_text("{")
    (shelf.folder / "garbled-signature").mkdir()
    for name, body in (("pack.json", (shelf.folder / "edited" / "pack.json").read_bytes()),
                       ("signature.json", b"[]")):  # fmt: skip
        (shelf.folder / "garbled-signature" / name).write_bytes(body)
    shelf.add("piped")
    (shelf.folder / "piped" / "signature.json").unlink()
    os.mkfifo(shelf.folder / "piped" / "signature.json")  # waits for ever for who opens it to read
    (shelf.folder / "cpu").mkdir()  # sources alone: no pack
    engine = make()
    assert engine.stats().pack == ""
    for words in (
        "edited: the pack's file logits_head.cpp is not the one that was judged",
        "foreign: its signer, key ",
        "unsigned: it is not signed",
        "garbled: ",
        "garbled-signature: signature.json: ",
        "piped: signature.json: ",
    ):
        assert words in engine.kernels
    serves(engine)
    good = shelf.add("good")
    assert make().stats().pack == good


def test_damaged_project_keys(make: Make, shelf: PackShelf) -> None:
    shelf.add("cpu")
    (shelf.keys.folder / "trusted" / "bad.pub").write_text("no key")
    engine = make()
    assert engine.stats().pack == "" and "bad.pub is no public key" in engine.kernels
    serves(engine)


def test_without_a_compiler(make: Make, shelf: PackShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.add("cpu")
    shelf.add("cpu-old")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    engine = make()
    assert engine.kernels.startswith("kernels: stock operators: no C++ compiler: ")
    assert engine.kernels.count("no C++ compiler") == 1
    serves(engine)


def test_a_compiler_that_fails(
    make: Make, shelf: PackShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("cpu")
    use_compiler(tmp_path / "mock", "echo 'error: an old compiler' >&2; exit 1", monkeypatch)
    engine = make()
    assert "stock operators: cpu: logits_head.cpp does not compile: error: an old compiler" in engine.kernels
    serves(engine)


def test_one_pack_does_not_compile_and_the_next_does(make: Make, shelf: PackShelf) -> None:
    broken = shelf.folder.parent / "broken"
    broken.mkdir()
    shutil.copyfile(SOURCES / "broken.cpp", broken / "logits_head.cpp")
    shelf.add("a-new", sources=broken, features=sorted(build.cpu_features())[:2])
    plain = shelf.add("plain")
    engine = make()
    assert engine.stats().pack == plain
    assert engine.kernels.startswith("kernels: plain (logits_head); a-new: logits_head.cpp does not compile")
    serves(engine)


def test_a_compiler_that_hangs(
    make: Make, shelf: PackShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("cpu")
    shelf.add("cpu-old")
    use_compiler(tmp_path / "mock", "sleep 600", monkeypatch)
    engine = make(build_s=1.0)
    assert "cpu: logits_head.cpp: the compiler took longer than" in engine.kernels
    assert "cpu-old" not in engine.kernels, "no time is left for another one"
    serves(engine)


def test_built_once_and_kept(
    make: Make, shelf: PackShelf, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.add("cpu")
    count = tmp_path / "count"
    use_compiler(tmp_path / "mock", f'echo once >> {count}\nexec {find_compiler()[0]} "$@"', monkeypatch)
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(make())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engines.append(make())
    assert len({engine.stats().pack for engine in engines}) == 1 and engines[0].stats().pack
    assert len(list(cache.glob("*.so"))) == 1
    assert count.read_text().split() == ["once"], "who comes meanwhile waits for what is built"


@pytest.mark.parametrize("obstacle", ["a file", "full"])
def test_a_cache_that_takes_nothing(
    make: Make,
    shelf: PackShelf,
    cache: Path,
    tmp_path: Path,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Root may write to read-only folders, so other obstacles stand in for one."""
    pack = shelf.add("cpu")
    if obstacle == "a file":
        cache.parent.parent.mkdir(parents=True, exist_ok=True)
        cache.parent.write_text("")
    else:
        script = f"""case "$*" in *{cache}*) echo 'x: No space left on device' >&2; exit 1;; esac
        exec {find_compiler()[0]} "$@" """
        use_compiler(tmp_path / "mock", script, monkeypatch)
    before = set(Path("/tmp").glob("headrace-kernels-*"))
    engine = make()
    assert engine.stats().pack == pack
    serves(engine)
    assert "kernels are built at each start" in caplog.text
    assert set(Path("/tmp").glob("headrace-kernels-*")) <= before


def test_a_model_that_no_pack_fits(make: Make, shelf: PackShelf) -> None:
    shelf.add("other-shape", shapes={"hidden_size": 7})
    shelf.add("other-dtype", dtype="float32")
    engine = make()
    assert engine.stats().pack == ""
    assert "other-shape: the pack is for a model whose hidden_size is 7" in engine.kernels
    assert "other-dtype: it is for float32, the model is loaded as bfloat16" in engine.kernels
    serves(engine)
    engine = make("gpt_neox")
    assert "runs on Transformers' definition" in engine.kernels and engine.stats().pack == ""
    serves(engine)


def test_weights_that_a_kernel_does_not_read(make: Make, shelf: PackShelf) -> None:
    """A pack of which no kernel is left is passed over."""
    shelf.add("a-head", ops=["logits_head"], weight_formats=["q4_0"])
    both = shelf.add("both", ops=["rms_norm"])
    engine = make()
    assert engine.stats().pack == both
    assert engine.kernels == (
        "kernels: both (rms_norm); a-head: the kernel for logits_head covers none of the model's weights"
    )
    serves(engine)


def test_what_is_covered_in_part_is_said(make: Make, shelf: PackShelf) -> None:
    shelf.add("cpu", ops=["rms_norm", "linear"])
    model = make().runner.model
    assert isinstance(model, Packable)
    assert describe_coverage(model.ops, model.weights) == "rms_norm, linear"
    for op in native_ops(model.ops).values():
        for owner in list(op._sets)[::3]:
            del op._sets[owner]
    second, first = describe_coverage(model.ops, model.weights).split("), ")
    assert first.startswith("linear (8 of 12: not the shapes") and second.startswith("rms_norm (4 of 7: ")
    assert not is_batch_invariant(model.ops, model.weights)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 7;", "the kernel for logits_head failed: hr_run gave 7"),
        (
            "((float *)call->tensors[3].data)[0] = NAN; return HR_DONE;",
            "no valid",
        ),
    ],
    ids=["fails", "NaN"],
)
def test_kernels_that_fail_on_this_model(
    make: Make, shelf: PackShelf, tmp_path: Path, body: str, reason: str
) -> None:
    """They are tried on a few tokens before anybody is served."""
    sources = tmp_path / "sources"
    sources.mkdir()
    head = '#include <cmath>\n#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *call) '
    (sources / "logits_head.cpp").write_text(f"{head}{{ {body} }}\n")
    shelf.add("a-bad", sources=sources, features=sorted(build.cpu_features())[:1])
    good = shelf.add("good", ops=["rms_norm"])
    engine = make()
    assert engine.stats().pack == good
    assert "; a-bad: " in engine.kernels and reason in engine.kernels
    serves(engine)


def test_a_kernel_that_fails_shows_no_traceback(
    make: Make, shelf: PackShelf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    head = '#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *) '
    (sources / "logits_head.cpp").write_text(f"{head}{{ return 7; }}\n")
    shelf.add("bad", sources=sources)
    make()
    told = [record for record in caplog.records if "pack bad" in record.getMessage()]
    assert told and all(record.exc_info is None for record in told)


def test_damaged_libraries_are_built_again(make: Make, shelf: PackShelf, cache: Path) -> None:
    pack = shelf.add("cpu")
    assert make().stats().pack == pack
    (library,) = cache.glob("*.so")
    good = library.read_bytes()
    library.unlink()  # what runs keeps its own
    library.write_bytes(good[:5000])
    engine = make()
    assert engine.stats().pack == pack
    serves(engine)
    assert len(library.read_bytes()) > 5000


@pytest.mark.parametrize("threads", [1, 16])
def test_one_core_and_sixteen(make: Make, shelf: PackShelf, threads: int) -> None:
    shelf.add("cpu", ops=["logits_head", "rms_norm"])
    engine = make(threads=threads)
    assert engine.stats().pack
    serves(engine)
