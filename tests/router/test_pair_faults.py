"""Split prompts whose blocks do not come: whose fault it is, and what the halves leave behind."""

from __future__ import annotations

import pytest

from headrace.core.messages import Timing
from headrace.router.breaker import FAULTS
from headrace.router.router import Router
from tests.router.pairs import (
    LONG,
    NUM_BLOCKS,
    began,
    delivered,
    kv,
    place,
    release,
    split,
    status_of,
    streams,
    words,
)
from tests.router.routing import BLOCK, up


def fail_fetches(router: Router, count: int) -> None:
    for i in range(count):
        assert place(router, f"lost{i}", *(n + 1000 * i for n in LONG)).prefill_replica == "p0"
        began(router, f"lost{i}", Timing(0.0, 0.8, 1608, fill_s=0.1))
        release(router, f"lost{i}")


def test_fetches_that_deliver_nothing_open_the_givers_breaker():
    router = split()
    streams(router, 4)
    fail_fetches(router, FAULTS)
    status = status_of(router, "p0")
    assert (status.breaker, status.num_faults) == ("open", FAULTS)
    assert not place(router, "alone", *LONG).prefill_replica
    assert words(router, "alone") == "not split: p0: breaker open"
    assert status_of(router, "d0").num_faults == 0


def test_one_fetch_on_trial_closes_it_again():
    router = split()
    streams(router, 4)
    fail_fetches(router, FAULTS)
    now = 5.0
    assert place(router, "trial", *LONG, now=now).prefill_replica == "p0"
    assert not place(router, "meanwhile", *(n + 9000 for n in LONG), now=now).prefill_replica
    began(router, "trial", delivered(), now=now + 1)
    assert status_of(router, "p0").breaker == "closed"


@pytest.mark.parametrize(
    "timing",
    [
        delivered(),
        delivered(NUM_BLOCKS * BLOCK * 3 // 5),  # the rest was computed
        Timing(0.0, 0.8, 1608),  # the engine did not ask: it had no room for blocks to come
        Timing(0.0, 0.01, 8, fill_s=0.1, num_disk_tokens=1600),  # it had them on disk after all
        None,  # an engine that does not tell
    ],
)
def test_what_is_no_fault_of_the_givers_does_not_count_against_it(timing):
    router = split()
    streams(router, 4)
    for i in range(2 * FAULTS):
        assert place(router, f"r{i}", *(n + 1000 * i for n in LONG)).prefill_replica == "p0"
        began(router, f"r{i}", timing)
        release(router, f"r{i}")
    assert status_of(router, "p0").num_faults == 0


def test_a_prefill_side_that_the_gateway_saw_fail_is_at_fault():
    router = split()
    streams(router, 4)
    for i in range(FAULTS):
        place(router, f"r{i}", *(n + 1000 * i for n in LONG))
        release(router, f"r{i}", "aborted", prefill="replica_fault")
    assert status_of(router, "p0").breaker == "open"
    assert status_of(router, "d0").num_faults == 0


def test_a_decode_replica_that_dies_takes_its_prompts_out_of_the_givers_queue():
    router = split(decode=2)
    streams(router, 8)
    placement = place(router, "r", *LONG)
    up(router, placement.replica_id, instance="two", kv=kv("decode", placement.replica_id))
    router.check_integrity()
    assert status_of(router, "p0").num_in_flight == 0
    release(router, "r", "replica_gone")
    place(router, "again", *LONG)
    router.remove_endpoint("p0", 0.0)
    router.check_integrity()
    began(router, "again", Timing(0.0, 0.8, 1608, fill_s=0.1))
    release(router, "again")


def test_a_giver_that_restarts_forgets_what_it_owed():
    router = split()
    streams(router, 4)
    place(router, "r", *LONG)
    up(router, "p0", instance="two", kv=kv("prefill", "p0", address="unix:/p0-two"))
    router.check_integrity()
    assert status_of(router, "p0").num_in_flight == 0
    began(router, "r", Timing(0.0, 0.8, 1608, fill_s=0.1))
    assert status_of(router, "p0").num_faults == 0  # another process is not to blame
    assert place(router, "next", *(n + 1000 for n in LONG)).prefill_address == "unix:/p0-two"
