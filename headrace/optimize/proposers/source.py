"""One C++ file of a template: its constants, the slots of its op, and the files it includes, in line."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from headrace.kernels.native.signature import SIGNATURES

_INCLUDE = '#include "'


def write_source(op: str, constants: Mapping[str, int]) -> str:
    """The source of ``op``'s template with ``constants`` defined (``HR_`` before each name)."""
    signature = SIGNATURES[op]
    lines = [f"// {op}, written by headrace's search from its template"]
    lines += [f"#define HR_{name} {value}" for name, value in constants.items()]
    lines += [
        f"enum {{ {', '.join(prefix + name for name in names)} }};"
        for prefix, names in (("S_", signature.names()), ("I_", signature.ints), ("F_", signature.floats))
        if names
    ]
    return "\n".join(lines) + "\n\n" + expanded(f"{op}.cpp")


def expanded(name: str) -> str:
    """A template's text with the files of its folder that it includes in line."""
    return _expanded(name, set())


def _expanded(name: str, included: set[str]) -> str:
    """A template's text with each file of this folder that it includes in its place, once."""
    included.add(name)
    text = resources.files("headrace.optimize.proposers").joinpath("templates", name).read_text("utf-8")
    lines = []
    for line in text.splitlines():
        wanted = line.removeprefix(_INCLUDE).removesuffix('"')
        if not line.startswith(_INCLUDE) or not wanted.endswith(".cpp"):
            lines.append(line)
        elif wanted not in included:
            lines.append(_expanded(wanted, included))
    return "\n".join(lines) + "\n"
