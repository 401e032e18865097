"""The other side of a comparison for kernels that are made for a CPU without AVX-512, where this one has it.

Torch's operators choose their instructions by the CPU that they run on. Left alone they would be faster here
than where the kernels are for, and a kernel would be held against what nobody has who runs it. So processes
of the judge that compute with them are started with what limits each of their libraries; that is the
baseline, and the engine around the candidate just so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.core.errors import UsageError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.build import cpu_features

_WIDER = "avx512f"
_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
_FLAG = f"-mno-{_WIDER}"


def is_lesser(features: Collection[str]) -> bool:
    """Whether kernels that ask a CPU for ``features``, words of /proc/cpuinfo, are for a lesser one than
    this: with AVX2 and without the AVX-512 that is here."""
    return "avx2" in features and _WIDER not in features and _WIDER in cpu_features()


def limits(features: Collection[str]) -> Mapping[str, str]:
    """Environment in which torch computes as on a CPU of these features; empty: as it is."""
    return dict(_ENVIRONMENT) if is_lesser(features) else {}


def described(features: Collection[str]) -> str:
    """For the evidence; empty: nothing was limited."""
    words = ", ".join(f"{name}={value}" for name, value in limits(features).items())
    return f"limited to AVX2, as on a CPU that has no more ({words})" if words else ""


def check_flags_for(features: Collection[str], entries: Sequence[KernelEntry]) -> None:
    """Raises UsageError for a kernel that would be built with what such a CPU lacks."""
    if not is_lesser(features):
        return
    for entry in entries:
        if _FLAG not in entry.flags:
            raise UsageError(
                f"{entry.op} is for CPUs without {_WIDER} (--features), and is built with it on this one",
                hint=f"add {_FLAG} to its flags",
            )
