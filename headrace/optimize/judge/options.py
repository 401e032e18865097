"""How thorough the judge is, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class JudgeOptions:
    """``threads`` 0: as many as there are cores. Times in seconds.

    compile_s            limit of the compiler; load_s of loading and of packing; call_s of one call. All
                         are generous: a busy machine must not look like a candidate that hangs
    endurance_calls      calls in a row before fresh content is checked; endurance_s bounds them
    alone_s              time for pairs of passes, alone; end_to_end_s likewise for the whole workload
    roof                 bytes per second that the machine streams at most; 0: measured
    features             what kernels ask a CPU for (words of /proc/cpuinfo); none: what this one has. For a
                         lesser one torch's operators are limited (lesser_cpu.py)
    """

    threads: int = 0
    compile_s: float = 90.0
    load_s: float = 60.0
    call_s: float = 10.0
    endurance_calls: int = 2000
    endurance_s: float = 1.0
    alone_s: float = 5.0
    end_to_end_s: float = 16.0
    roof: float = 0.0
    seed: int | None = None
    features: tuple[str, ...] = ()

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def cpus(self) -> frozenset[int]:
        """The cores that both sides of a comparison are pinned to."""
        return frozenset(sorted(os.sched_getaffinity(0))[: self.num_threads])

    def with_threads(self, threads: int) -> JudgeOptions:
        return replace(self, threads=threads)

    def for_cpu(self, features: Collection[str]) -> JudgeOptions:
        return replace(self, features=tuple(features))

    @staticmethod
    def quick() -> JudgeOptions:
        return JudgeOptions(endurance_calls=500, endurance_s=0.3, alone_s=1.5, end_to_end_s=6.0)
