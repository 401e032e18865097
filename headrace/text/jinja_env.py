"""The Jinja environment of chat templates, and the program of the child process that renders in it.

Set up as Transformers does, so that a model's own template behaves as its authors saw it. Run as a program
this file needs nothing but the standard library and Jinja: it starts fast, and a template that breaks out
of the sandbox finds little. Frames on its pipes: a 4-byte little-endian length, then the body.

    parent ──► child   the template's source (once), then {"variables": …, "timeout": seconds} in JSON
    child ──► parent   one status byte, then UTF-8 text: what was rendered, or what went wrong
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

RENDERED, COMPLAINT, FAILED, EXHAUSTED = b"r", b"c", b"f", b"x"
MEMORY_LIMIT = 1 << 30
MAX_FRAME = 1 << 28
_LENGTH = struct.Struct("<I")


class TemplateComplaint(jinja2.TemplateError):
    """The template itself refused its input, through ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class PublicNamespace(Namespace):
    """A namespace without underscore names, which lead to the interpreter's own objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: rename the attribute")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the filters, tags and functions that chat templates expect."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], **options
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.globals["namespace"] = PublicNamespace


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on: nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: Any) -> None:
    raise TemplateComplaint(str(message))


def strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def compile_template(source: str) -> Callable[[Mapping[str, Any]], str]:
    """A function from variables to text; raises Jinja's errors for a broken template."""
    template = ChatEnvironment().from_string(source)
    return lambda variables: template.render(variables)


def _attempt(work: Callable[[], str]) -> tuple[bytes, str]:
    try:
        return RENDERED, work()
    except TemplateComplaint as complaint:
        return COMPLAINT, str(complaint)
    except (MemoryError, RecursionError) as error:
        return EXHAUSTED, type(error).__name__
    except Exception as error:
        return FAILED, f"{type(error).__name__}: {error}"[:2000]


def _read_frame() -> bytes | None:
    header = sys.stdin.buffer.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = sys.stdin.buffer.read(length)
    return body if len(body) == length else None


def _write_frame(status: bytes, text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    if len(body) >= MAX_FRAME:
        status, body = EXHAUSTED, b"output"
    sys.stdout.buffer.write(_LENGTH.pack(len(body) + 1) + status + body)
    sys.stdout.buffer.flush()


def _confine() -> None:
    import resource

    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_LIMIT),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        _, hard = resource.getrlimit(limit)
        if hard == resource.RLIM_INFINITY or value <= hard:
            resource.setrlimit(limit, (value, value))


def main() -> None:
    """Serve renderings until the parent closes the pipe, or dies."""
    import signal

    # SIGALRM's default action ends the process even inside a C call, should the parent be gone by then.
    first = _read_frame()
    if first is None:
        return
    start = json.loads(first)
    signal.setitimer(signal.ITIMER_REAL, start["timeout"])
    _confine()
    compiled: list[Callable[[Mapping[str, Any]], str]] = []

    def build() -> str:
        compiled.append(compile_template(start["template"]))
        return ""

    status, text = _attempt(build)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write_frame(status, text)
    while compiled and (frame := _read_frame()) is not None:
        signal.setitimer(signal.ITIMER_REAL, start["timeout"])
        status, text = _attempt(lambda body=frame: compiled[0](json.loads(body)))  # type: ignore[misc]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(status, text)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
