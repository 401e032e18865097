"""A killable child process that renders one chat template.

Jinja's sandbox bounds neither time nor memory; a process can be bounded in both. The child dies when its
pipe closes, when a rendering takes too long, or when it outgrows its memory, and the next call gets a new
one. Thread-safe; renderings are done one at a time.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.core.errors import EngineError, OverloadedError
from headrace.text import jinja_env

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 20


class TemplateTimeout(Exception):
    """The rendering was cut off: it took too long, or too much memory."""


class TemplateProcess:
    """Renders ``source`` in a child process within ``timeout`` seconds a call."""

    def __init__(self, source: str, timeout: float) -> None:
        self._source = source
        self._timeout = timeout
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> tuple[bytes, str]:
        """Starts a child and compiles the template in it: the child's status and message."""
        with self._lock:
            return self._start(time.monotonic() + self._timeout)

    def render(self, variables: dict[str, Any]) -> tuple[bytes, str]:
        """Status (see ``jinja_env``) and text. Raises TemplateTimeout, and OverloadedError when others
        kept the child busy for the whole timeout."""
        body = json.dumps(variables, ensure_ascii=True).encode()
        if not self._lock.acquire(timeout=self._timeout):
            raise OverloadedError("the chat template is still busy with other requests")
        try:
            deadline = time.monotonic() + self._timeout
            if self._child is None or self._child.poll() is not None:
                self._stop()
                status, text = self._start(deadline)
                if status != jinja_env.RENDERED:
                    return status, text
            return self._exchange(body, deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the child; the next call would start another."""
        with self._lock:
            self._stop()

    def _start(self, deadline: float) -> tuple[bytes, str]:
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(Path(jinja_env.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # No keys or tokens for a template to find, and no Ctrl+C meant for the server.
                env={name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise EngineError(f"could not start the process that renders chat templates: {error}") from error
        assert self._child.stdin is not None and self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        os.set_blocking(self._child.stdout.fileno(), False)
        start = {"template": self._source, "timeout": self._timeout + 1}
        return self._exchange(json.dumps(start).encode(), deadline)

    def _exchange(self, body: bytes, deadline: float) -> tuple[bytes, str]:
        try:
            self._write(_LENGTH.pack(len(body)) + body, deadline)
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
            if not 1 <= length <= jinja_env.MAX_FRAME:
                raise TemplateTimeout
            answer = self._read(length, deadline)
            status, text = bytes(answer[:1]), str(answer[1:], "utf-8", "surrogatepass")
        except (TemplateTimeout, OSError, UnicodeError) as error:
            self._stop()
            raise TemplateTimeout from error
        if status == jinja_env.EXHAUSTED:
            self._stop()  # a process that ran out of memory is not trusted with the next request
            raise TemplateTimeout
        return status, text

    def _write(self, data: bytes, deadline: float) -> None:
        assert self._child is not None and self._child.stdin is not None
        descriptor = self._child.stdin.fileno()
        view = memoryview(data)
        while view:
            _wait(descriptor, select.POLLOUT, deadline)
            try:
                view = view[os.write(descriptor, view[:_CHUNK]) :]
            except BlockingIOError:
                continue

    def _read(self, length: int, deadline: float) -> bytearray:
        assert self._child is not None and self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        data = bytearray()
        while len(data) < length:
            _wait(descriptor, select.POLLIN, deadline)
            try:
                chunk = os.read(descriptor, min(_CHUNK, length - len(data)))
            except BlockingIOError:
                continue
            if not chunk:
                raise TemplateTimeout
            data += chunk
        return data

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poller = select.poll()
    poller.register(descriptor, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poller.poll(remaining * 1000):
        raise TemplateTimeout
