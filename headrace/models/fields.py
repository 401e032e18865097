"""Reads the fields of a JSON configuration with their types, and remembers which were read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import CorruptFileError, ModelNotFoundError

MAX_JSON_BYTES = 64 * 1024 * 1024


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises ModelNotFoundError when absent, CorruptFileError when it is no object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CorruptFileError(
                f"{path} is {size} bytes long; a JSON file here has at most {MAX_JSON_BYTES}"
            )
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{path.parent} holds no {path.name}",
            hint="give a folder in the Hugging Face layout, or download the model again",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} cannot be read as JSON: {error}", hint="download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


class Fields:
    """Typed access to one JSON object; every wrong type is a CorruptFileError that names the field.

    null counts as absent, as it mostly does in Transformers' configurations; ``given`` tells the two
    apart where it matters.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = raw
        self.where = where
        self.read: set[str] = set()

    def given(self, name: str) -> bool:
        """Whether the field stands there at all, null included."""
        self.read.add(name)
        return name in self.raw

    def value(self, name: str) -> Any:
        self.read.add(name)
        return self.raw.get(name)

    def wrong(self, name: str, needed: str) -> CorruptFileError:
        return CorruptFileError(f"{self.where}: {name} must be {needed}, got {str(self.raw.get(name))[:200]}")

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int = 2**31) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.wrong(name, f"a whole number in [{minimum}, {maximum}]")
        return value

    def integer(self, name: str, default: int, *, minimum: int = 1, maximum: int = 2**31) -> int:
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.value(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.value(name)
        if not isinstance(value, list) or not all(
            isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
            for item in value
        ):
            raise self.wrong(name, "a list of finite numbers")
        return tuple(float(item) for item in value)

    def texts(self, name: str) -> list[str] | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return list(value)
