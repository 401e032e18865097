from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.gaps import gaps_between, gaps_within, longest_after
from headrace.bench.metrics import (
    RequestTrace,
    interquartile_range,
    mean_interval,
    median,
    output_throughput,
    percentile,
    summarise,
    time_percentile,
)

FINITE = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(st.lists(FINITE, min_size=1, max_size=60), st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys_linear_one(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(st.lists(FINITE, min_size=1, max_size=60))
def test_median_and_spread(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values), rel=1e-9, abs=1e-6)
    quartiles = np.percentile(values, [25, 75])
    assert interquartile_range(values) == pytest.approx(quartiles[1] - quartiles[0], rel=1e-9, abs=1e-6)


def test_a_stall_counts_as_long_as_it_lasts() -> None:
    gaps = [0.01] * 990 + [5.0, 5.0]
    assert percentile(gaps, 99) == 0.01  # two of a thousand
    assert time_percentile(gaps, 99) == 5.0  # half of the time
    assert time_percentile(gaps, 49) == 0.01
    assert time_percentile([0.1] * 99 + [0.11], 98) == 0.1


@given(
    st.lists(st.floats(min_value=0.001, max_value=100), min_size=1, max_size=60),
    st.floats(min_value=0, max_value=99.9),
)
def test_time_percentile_leaves_little_time_beyond(gaps: list[float], q: float) -> None:
    found = time_percentile(gaps, q)
    beyond = sum(gap for gap in gaps if gap > found) / sum(gaps)
    assert beyond <= 1 - q / 100 + 1e-9
    assert sum(gap for gap in gaps if gap >= found) / sum(gaps) >= 1 - q / 100 - 1e-9


def test_nothing_has_no_percentile() -> None:
    assert math.isnan(time_percentile([], 99))
    assert math.isnan(percentile([], 50))
    assert summarise([math.nan]).count == 0


def trace(sent: float, times: list[float], tokens: int, error: str | None = None) -> RequestTrace:
    return RequestTrace(
        sent=sent, text_times=times, finished=times[-1] if times else sent, output_tokens=tokens, error=error
    )


def test_definitions_on_one_request() -> None:
    # Sent at 10, text at 12, 13, 15; six tokens in three pieces.
    one = trace(10.0, [12.0, 13.0, 15.0], 6)
    assert one.ttft == 2.0
    assert one.e2el == 5.0
    assert one.tpot == pytest.approx((5.0 - 2.0) / 5)
    assert one.itls == [1.0, 2.0]


def test_one_token_has_no_time_per_further_token() -> None:
    assert math.isnan(trace(0.0, [1.0], 1).tpot)
    assert summarise([trace(0.0, [1.0], 1).tpot, 3.0]).mean == 3.0


def test_throughput_spans_first_send_to_last_end() -> None:
    assert output_throughput([trace(1.0, [2.0], 10), trace(2.0, [6.0], 20)]) == pytest.approx(30 / 5)
    assert math.isnan(output_throughput([trace(0.0, [1.0], 3, error="boom")]))


def test_gaps_inside_a_window_are_cut_at_its_end() -> None:
    times = [0.0, 1.0, 2.0, 2.5, 9.0]
    assert gaps_between(times) == [1.0, 1.0, 0.5, 6.5]
    # [1, 2] and [2, 2.5] overlap [1.5, 3]; [2.5, 9] is cut at 3.
    assert gaps_within(times, 1.5, 3.0) == [1.0, 0.5, 0.5]
    # A stream that went silent still has a gap: until the window's end.
    assert gaps_within([0.0, 1.0], 5.0, 7.0) == [6.0]
    assert longest_after(times, 2.2) == 6.5
    assert longest_after(times, 9.0) == 0.0


def test_the_interval_of_a_mean_is_students() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # standard deviation sqrt(2.5), t 2.776 with 4 degrees of freedom
    assert (low + high) / 2 == pytest.approx(3.0)
    assert (high - low) / 2 == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert mean_interval([1.0]) == (-math.inf, math.inf)
    assert mean_interval([7.0] * 40) == (7.0, 7.0)
