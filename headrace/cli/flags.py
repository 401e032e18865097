"""Flags, environment variables and file keys, all generated from the knobs.

--max-num-seqs 8   beats   HEADRACE_MAX_NUM_SEQS=8   beats   max_num_seqs: 8 in --config FILE
"""

from __future__ import annotations

import argparse
import difflib
import math
import typing
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.cli.config_file import FileValue
from headrace.core.errors import UsageError

PREFIX = "HEADRACE_"
# Read by the scripts, before there is a headrace to ask.
NOT_KNOBS = {"HEADRACE_VENV", "HEADRACE_PYTHON"}
LONG_HELP = "`headrace serve --help` lists what there is"
HEAT_HELP = "warm: trades one figure for another, measure before and after; hot: changes memory or numerics"
MAX_LISTED_KEYS = 20

Config = TypeVar("Config", bound=msgspec.Struct)


class Knob(msgspec.Struct, frozen=True):
    """One field of a configuration struct, as the command line sees it."""

    name: str
    type: Any
    default: Any
    description: str
    heat: str
    word: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return _bare(self.type) is bool

    @property
    def is_list(self) -> bool:
        return typing.get_origin(_bare(self.type)) is list

    @property
    def choices(self) -> tuple[str, ...]:
        bare = _bare(self.type)
        return typing.get_args(bare) if typing.get_origin(bare) is typing.Literal else ()


def knobs_of(config: type[msgspec.Struct]) -> list[Knob]:
    """The knobs of a configuration struct, in order."""
    hints = typing.get_type_hints(config, include_extras=True)
    knobs = []
    for field in msgspec.structs.fields(config):
        meta = hints[field.name].__metadata__[0]
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        heat, word = meta.extra["heat"], meta.extra.get("word", "")
        knobs.append(Knob(field.name, hints[field.name], default, meta.description, heat, word))
    return knobs


def add_flags(parser: argparse.ArgumentParser, title: str, config: type[msgspec.Struct]) -> None:
    """One flag a knob; a flag that is not given leaves no trace in the namespace."""
    parser.epilog = HEAT_HELP
    group = parser.add_argument_group(title)
    for knob in knobs_of(config):
        text = f"{knob.description} [{knob.variable}"
        if knob.default not in (None, []):
            text += f"; default: {_shown(knob.default)}"
        text += "]" if knob.heat == "cold" else f"; {knob.heat}]"
        options: dict[str, Any] = {"dest": knob.name, "default": argparse.SUPPRESS}
        if knob.is_bool:
            options["action"] = argparse.BooleanOptionalAction
        elif knob.is_list:
            options |= {"action": "append", "metavar": knob.word or "TEXT"}
        elif knob.choices:
            options["metavar"] = "{" + ",".join(knob.choices) + "}"
        else:
            options["metavar"] = knob.word or _metavar(knob.type)
        group.add_argument(knob.flag, help=text.replace("%", "%%"), **options)


def load_config(
    config: type[Config],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Mapping[str, FileValue],
) -> Config:
    """The configuration from all three sources.

    Raises UsageError naming the flag, the variable, or the file and line whose value is wrong.
    """
    values = {}
    for knob in knobs_of(config):
        if knob.name in flags:
            values[knob.name] = _convert(knob, flags[knob.name], knob.flag)
        elif knob.variable in environment:
            text: Any = environment[knob.variable]
            values[knob.name] = _convert(knob, text.split(",") if knob.is_list else text, knob.variable)
        elif knob.name in file:
            value = file[knob.name]
            values[knob.name] = _convert(knob, value.value, f"{value.where}: {knob.name}")
    return config(**values)


def check_names(
    configs: Iterable[type[msgspec.Struct]],
    environment: Mapping[str, str],
    file: Mapping[str, FileValue],
    also: Iterable[str] = (),
) -> list[str]:
    """Warnings about HEADRACE_* variables that mean nothing; an unknown file key is a UsageError.

    ``also`` are keys of the file that stand for no knob.
    """
    knobs = [knob for config in configs for knob in knobs_of(config)]
    names = [knob.name for knob in knobs] + list(also)
    for key, value in file.items():
        if key not in names:
            known = LONG_HELP if len(names) > MAX_LISTED_KEYS else f"there are: {', '.join(names)}"
            raise UsageError(f"{value.where}: unknown key {key!r}", hint=_did_you_mean(key, names, known))
    variables = {knob.variable for knob in knobs}
    return [
        f"{name} is set but means nothing; {_did_you_mean(name, variables, LONG_HELP)}"
        for name in environment
        if name.startswith(PREFIX) and name not in variables | NOT_KNOBS
    ]


def is_given(
    name: str, flags: Mapping[str, Any], environment: Mapping[str, str], file: Container[str]
) -> bool:
    """Whether a knob was set anywhere, be it to its default."""
    return name in flags or PREFIX + name.upper() in environment or name in file


def non_defaults(config: msgspec.Struct) -> list[str]:
    """``flag value`` of what differs from its default; keys are never shown."""
    shown = []
    for knob in knobs_of(type(config)):
        value = getattr(config, knob.name)
        if value != knob.default:
            shown.append(f"{knob.flag} {'***' if 'key' in knob.name else value}")
    return shown


def _convert(knob: Knob, value: Any, where: str) -> Any:
    try:
        converted = msgspec.convert(value, knob.type, strict=False)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise msgspec.ValidationError("expected a finite number")
        return converted
    except msgspec.ValidationError as error:
        shown = "***" if "key" in knob.name else repr(value)
        wanted = str(error).split(" - at ")[0].replace("`", "").replace("Expected", "expected")
        if knob.choices:
            wanted = f"expected {' or '.join(knob.choices)}"
        raise UsageError(f"{where}: {wanted}, got {shown}", hint=knob.description, param=knob.name) from None


def _did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def _bare(annotated: Any) -> Any:
    bare = typing.get_args(annotated)[0]
    parts = typing.get_args(bare)
    if type(None) in parts:
        bare = next(part for part in parts if part is not type(None))
        bare = typing.get_args(bare)[0] if hasattr(bare, "__metadata__") else bare
    return bare


def _shown(default: Any) -> str:
    return ("off", "on")[default] if isinstance(default, bool) else str(default)


def _metavar(annotated: Any) -> str:
    return {int: "N", float: "X"}.get(_bare(annotated), "TEXT")
