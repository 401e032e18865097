"""Packs for ``bench invariance``, made of packs/cpu by naming what becomes what.

    fixed   packs/cpu as it is
    freed   no order is promised: decode rows attend by freed/attend_decode.h, and the compiler may reorder
            and fuse

A change that does not apply any more is an error: nothing is measured that is not what it says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.errors import PackError
from headrace.core.packs import KernelEntry, PackConditions, PackManifest

SOURCES = Path(__file__).resolve().parent.parent / "packs" / "cpu"
HEADERS = Path(__file__).resolve().parent / "freed"


@dataclass(frozen=True)
class Change:
    """``old`` stands in ``file`` exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Variant:
    """``headers`` are files of freed/; ``flags`` take the place of -ffp-contract=off where there are any."""

    name: str
    changes: tuple[Change, ...] = ()
    headers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    batch_invariant: bool = True


FIXED = Variant("fixed")

FREED = Variant(
    "freed",
    (
        Change("decoder_layer.cpp", '#include "attend.h"\n', '#include "attend_decode.h"\n'),
        Change(
            "decoder_layer.cpp", "    AttendPlan plan;\n", "    AttendPlan plan;\n    DecodePlan decodes;\n"
        ),
        Change(
            "decoder_layer.cpp",
            "        plan.carve(cache, carver);\n",
            "        plan.carve(cache, carver), decodes.carve(cache, carver);\n",
        ),
        Change(
            "decoder_layer.cpp",
            "        attend_all(cache, plan, team, [=](",
            "        const auto emit = [=](",
        ),
        Change(
            "decoder_layer.cpp",
            "            memcpy(to + row * width + head * dim, values, 4 * dim);\n        });\n",
            "            memcpy(to + row * width + head * dim, values, 4 * dim);\n        };\n"
            "        if (cache.num_chunks) attend_all(cache, plan, team, emit);\n"
            "        DecodeWork{cache, decodes, plan.queries}.run(emit);\n",
        ),
        Change(
            "decoder_layer.cpp",
            "    layer.plan.measure(layer.cache, threads);\n",
            "    layer.plan.measure(layer.cache, threads), layer.decodes.measure(layer.cache, threads);\n",
        ),
        Change(
            "decoder_layer.cpp",
            "    layer.plan.start(layer.cache);\n",
            "    layer.plan.start(layer.cache), layer.decodes.start(layer.cache);\n",
        ),
        Change(
            "attend.h",
            "for (int64_t row = 0; row < c.num_decodes; row++)\n            for (int64_t head",
            "for (int64_t row = c.num_decodes; row < c.num_decodes; row++)\n            for (int64_t head",
        ),
    ),
    headers=("attend_decode.h",),
    flags=("-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    batch_invariant=False,
)


def write_variant(variant: Variant, folder: Path, sources: Path = SOURCES) -> Path:
    """An unsigned pack in ``folder``. Raises PackError where a change does not apply to the sources."""
    texts = {path.name: path.read_text() for path in sources.iterdir() if path.suffix in (".h", ".cpp")}
    for change in variant.changes:
        found = texts.get(change.file, "").count(change.old)
        if found != 1:
            raise PackError(
                f"variant {variant.name!r} changes one place of {change.file} that reads "
                f"{change.old.strip().splitlines()[0]!r}, and there are {found}",
                hint=f"bring benchmarks/{Path(__file__).name} up to date with packs/cpu",
            )
        texts[change.file] = texts[change.file].replace(change.old, change.new)
    texts |= {name: (HEADERS / name).read_text() for name in variant.headers}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    entries = msgspec.json.decode((sources / "kernels.json").read_bytes(), type=list[KernelEntry])
    manifest = PackManifest(
        format=1,
        name=variant.name,
        kind="kernels",
        kernels=[_entry(entry, variant) for entry in entries],
        conditions=PackConditions(),
        author="bench invariance",
        round_id="",
        licence="Apache-2.0",
        created="2026-01-01T00:00:00Z",
        files={name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())},
    )
    (folder / "pack.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def _entry(entry: KernelEntry, variant: Variant) -> KernelEntry:
    flags = [*variant.flags] or entry.flags
    return msgspec.structs.replace(entry, flags=flags, batch_invariant=variant.batch_invariant)
