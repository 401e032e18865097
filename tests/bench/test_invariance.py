"""bench invariance without its kernels: how the packs are made, and what the rows say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.freed_pack import FIXED, FREED, SOURCES, Variant, write_variant
from benchmarks.invariance import Measured, rows_of
from benchmarks.sides.invariance import SCENARIOS
from headrace.bench.report import Row
from headrace.core.errors import PackError
from headrace.kernels.native.build_cache import read_files
from headrace.kernels.native.pack import read_manifest


@pytest.mark.parametrize("variant", [FIXED, FREED], ids=lambda variant: variant.name)
def test_a_variant_is_the_shipped_sources_and_its_changes(variant: Variant, tmp_path: Path) -> None:
    folder = write_variant(variant, tmp_path / "pack")
    manifest, _ = read_manifest(folder)
    contents = read_files(folder, manifest)
    changed = {change.file for change in variant.changes}
    for name, body in contents.items():
        if name not in variant.headers:
            assert (body == (SOURCES / name).read_bytes()) == (name not in changed), name
    assert set(variant.headers) <= set(contents)
    assert all(entry.batch_invariant == variant.batch_invariant for entry in manifest.kernels)
    assert all(("-ffp-contract=off" in entry.flags) == (not variant.flags) for entry in manifest.kernels)


def test_a_change_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "cpu")
    change = FREED.changes[-1]
    file = tmp_path / "cpu" / change.file
    file.write_text(file.read_text().replace(change.old, ""))
    with pytest.raises(PackError, match=rf"one place of {change.file}.*there are 0"):
        write_variant(FREED, tmp_path / "pack", tmp_path / "cpu")
    file.write_text(file.read_text() + change.old * 2)
    with pytest.raises(PackError, match="there are 2"):
        write_variant(FREED, tmp_path / "pack", tmp_path / "cpu")


def rows(freed: float = 0.9) -> dict[str, Row]:
    times = {"fixed": [1.0, 2.0, 1.0], "again": [1.0, 2.0, 1.0]}
    times["freed"] = [freed * seconds for seconds in times["fixed"]]
    measured = Measured({"decode_8": times}, {"decode_8": 8}, {"fixed": 1e-3, "freed": 1e-3})
    return {row.id: row for row in rows_of("file", measured)}


def test_a_cost_is_the_share_of_speed_that_the_order_takes() -> None:
    found = rows()
    speed = found["file.decode_8"]
    assert speed.value == pytest.approx(8) and speed.peer_value == pytest.approx(8 / 0.9)
    cost = found["file.decode_8.cost"]
    assert cost.value == pytest.approx(0.1) and cost.met is False
    assert found["file.decode_8.chance"].value == pytest.approx(0)
    assert found["file.kl"].met
    assert rows(freed=0.96)["file.decode_8.cost"].met


def test_decodes_come_before_chunks_in_every_step() -> None:
    for sequences in SCENARIOS.values():
        counts = [new for _, new in sequences]
        assert counts == sorted(counts)
