"""Reads ``--config FILE`` (YAML) and keeps the line of every key, so that an error can name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import UsageError


class FileValue(msgspec.Struct, frozen=True):
    """A value and where it stands, as ``file:line``."""

    value: Any
    where: str


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
    values: dict[str, FileValue] = {}
    for key, value in document.items():
        where = f"{path}:{document.lc.key(key)[0] + 1}"
        name = str(key).replace("-", "_")
        if name in values:
            raise UsageError(f"{where}: {name} is set twice (first at {values[name].where})")
        values[name] = FileValue(value, where)
    return values
