"""Every candidate that cheats, breaks out or breaks down is rejected, and for the right reason."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.verify import verify
from tests.optimize.judge.candidates import HERE, candidate, target

OPTIONS = JudgeOptions(
    threads=2, compile_s=200.0, call_s=8.0, endurance_calls=400, endurance_s=0.5, end_to_end_s=1.0
)
REASONS = {
    "wrong_result": [
        "zeros",
        "copies_input",
        "samples_the_sum",
        "lower_precision",
        "overflows",
    ],
    "incomplete": ["writes_nothing", "half_the_rows", "most_of_the_columns"],
    "stale_result": [
        "caches_by_pointer",
        "caches_by_content",
        "caches_weights_by_pointer",
        "skips_after_calls",
    ],
    "still_running": ["side_thread", "finishes_late"],
    "not_deterministic": ["random_result"],
    "input_changed": ["changes_input", "changes_weights"],
    "out_of_bounds": [
        "writes_past_the_end",
        "writes_before_the_start",
        "reads_past_the_end",
        "writes_packed",
        "packs_too_much",
    ],
    "environment_touched": [
        "changes_rounding",
        "flushes_denormals",
        "edits_the_harness",
        "patches_code",
        "forges_replies",
        "catches_signals",
    ],
    "out_of_limits": ["forks", "fills_the_disk", "prints_megabytes"],
    "out_of_memory": ["allocates_100_gb", "allocates_bit_by_bit"],
    "timed_out": ["hangs", "sleeps", "compiles_forever"],
    "crashed": ["crashes", "aborts", "exits", "fails"],
    "forbidden": [
        "tries_the_network",
        "patches_the_timer",
        "falls_back_to_torch",
        "loads_a_library",
        "includes_a_secret",
    ],
    "declined": ["declines", "knows_one_shape"],
    "compile_error": ["does_not_compile"],
    "malformed": ["no_entry"],
}
# what freed memory holds is garbage, or by luck nothing at all
EITHER = {"reads_freed_memory": {"wrong_result", "incomplete"}}
CASES = [(name, {reason}) for reason, names in REASONS.items() for name in names] + list(EITHER.items())
# the runner's filter and its control word are x86's
ONLY_X86 = {
    "flushes_denormals",
    "patches_code",
    "catches_signals",
    "forks",
    "fills_the_disk",
    "tries_the_network",
}


def test_every_cheat_is_expected() -> None:
    assert {path.stem for path in (HERE / "cheats").glob("*.cpp")} == {name for name, _ in CASES}
    assert len(CASES) >= 20


@pytest.mark.parametrize(("name", "reasons"), CASES, ids=[name for name, _ in CASES])
def test_cheat(name: str, reasons: set[str], tmp_path: Path) -> None:
    if name in ONLY_X86 and platform.machine() != "x86_64":
        pytest.skip("needs x86-64")
    options = OPTIONS
    if name == "compiles_forever":
        options = JudgeOptions(threads=2, compile_s=1.0)
    folder = candidate(tmp_path / name, HERE / "cheats" / f"{name}.cpp")
    verdict = verify(folder, target(), options=options)
    assert not verdict.passed
    assert verdict.reason in reasons, f"{verdict.reason}: {verdict.detail}"
    assert verdict.detail
