"""Reads ``--config FILE`` (YAML) and keeps the line of every value, so that an error can name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import UsageError


class FileValue(msgspec.Struct, frozen=True):
    """A value and where it stands; mappings and lists keep ruamel's types, as those know their lines."""

    value: Any
    path: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def read_config_file(path: Path) -> dict[str, FileValue]:
    """Top-level keys of a YAML mapping; ``max-num-seqs`` and ``max_num_seqs`` are the same key."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import YAMLError

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from error
    try:
        document = YAML(typ="rt").load(text)
    except YAMLError as error:
        raise UsageError(f"--config {path}: not valid YAML: {error}") from error
    except RecursionError:
        raise UsageError(f"--config {path}: nested too deeply") from None
    if document is None:
        return {}
    if not isinstance(document, CommentedMap):
        raise UsageError(
            f"--config {path}: needs a mapping of settings, found {type(document).__name__}",
            hint="write one setting a line, such as `port: 8000`",
        )
    return entries(FileValue(document, str(path), 1), "the file")


def entries(mapping: FileValue, what: str) -> dict[str, FileValue]:
    """The keys of a mapping in the file; UsageError where it is none, or has a key twice."""
    from ruamel.yaml.comments import CommentedMap

    document = mapping.value
    if not isinstance(document, CommentedMap):
        raise UsageError(
            f"{mapping.where}: {what} needs keys with values, found {_shown(document)}",
            hint="write `key: value`, one a line and indented",
        )
    values: dict[str, FileValue] = {}
    for key, value in document.items():
        # A key merged in with << has no line of its own.
        line = document.lc.key(key)[0] + 1 if key in (document.lc.data or {}) else mapping.line
        found = FileValue(_plain(value), mapping.path, line)
        name = str(key).replace("-", "_")
        if name in values:
            raise UsageError(f"{found.where}: {name} is set twice (first at {values[name].where})")
        values[name] = found
    return values


def items(sequence: FileValue, what: str) -> list[FileValue]:
    """The items of a list in the file; UsageError where it is none."""
    from ruamel.yaml.comments import CommentedSeq

    document = sequence.value
    if not isinstance(document, CommentedSeq):
        raise UsageError(
            f"{sequence.where}: {what} needs a list, found {_shown(document)}",
            hint="begin each item with `- `, one a line",
        )
    lines = document.lc.data or {}  # empty for a list with a tag
    return [
        FileValue(_plain(value), sequence.path, lines[index][0] + 1 if index in lines else sequence.line)
        for index, value in enumerate(document)
    ]


def _plain(value: Any) -> Any:
    """Scalars without ruamel's memory of how they were written."""
    if isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _shown(value: Any) -> str:
    return (
        "nothing"
        if value is None
        else f"{value!r:.60}"
        if isinstance(value, str | int | float)
        else {"CommentedMap": "keys with values", "CommentedSeq": "a list"}.get(
            type(value).__name__, type(value).__name__
        )
    )
