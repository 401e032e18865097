"""The server's end of the control socket, which the commands ps, why, scale, reload and packs talk to.

One request a connection, then lines of progress and a last word. A client that sends nonsense, nothing, or
does not read costs its own connection and nothing else; one that leaves early does not stop what it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from headrace.core.control import (
    Done,
    FromServer,
    Progress,
    Ps,
    PsReply,
    Refusal,
    Rollback,
    Rollout,
    Scale,
    ToServer,
    Why,
    WhyReply,
)
from headrace.core.errors import EngineError, HeadraceError, InvalidRequestError, NotFoundError, UsageError
from headrace.core.messages import Failed
from headrace.core.routing import Decision, FleetStatus
from headrace.core.wire import FrameDecoder, FrameError, encode_frame
from headrace.fleet.supervisor import Supervisor

log = logging.getLogger("headrace.fleet")

REQUEST_TIMEOUT_S = 10.0
MAX_REQUEST_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 1 << 20
MAX_CONNECTIONS = 64
LAST_WORDS_S = 10.0

_HINT = "set XDG_RUNTIME_DIR to a folder of your own"


class ControlServer:
    """Answers on a Unix socket that only this user can open, between ``start`` and ``close``."""

    def __init__(
        self,
        path: Path,
        *,
        status: Callable[[], Awaitable[FleetStatus]],
        why: Callable[[str], Awaitable[list[Decision]]],
        supervisor: Supervisor,
    ) -> None:
        """``path`` is ``core.control.control_path`` of the port; ``status`` and ``why`` are the router's."""
        self.path = path
        self._status = status
        self._why = why
        self._supervisor = supervisor
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises UsageError where the socket cannot be had: another server answers there, its folder is
        somebody else's, or it cannot be made. A server can do without."""
        listener = claim(self.path)
        self._inode = self.path.stat().st_ino
        self._server = await asyncio.start_unix_server(self._accept, sock=listener)

    async def close(self) -> None:
        """Ends every command that runs, and removes the socket."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before it ran at all has not closed it.
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(_read_request(reader), REQUEST_TIMEOUT_S)
            if request is not None:
                _write(writer, await self._answer(request, lambda line: _write(writer, Progress(line))))
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), LAST_WORDS_S)
        except InvalidRequestError as error:
            _write(writer, _refusal(error))
            writer.close()
        except (TimeoutError, OSError) as error:
            log.debug("control connection dropped: %s", error)
            writer.transport.abort()
        except BaseException:
            writer.transport.abort()
            raise

    async def _answer(self, request: ToServer, report: Callable[[str], None]) -> FromServer:
        """The last word on a request; whatever goes wrong is one too."""
        try:
            return await self._do(request, report)
        except HeadraceError as error:
            return _refusal(error)
        except Exception as error:
            log.exception("%s failed", request)
            return _refusal(EngineError(f"{type(error).__name__}: {error}", hint="see the server's log"))

    def _with_empty_models(self, status: FleetStatus) -> FleetStatus:
        """The router knows of replicas alone: a model without any is told of by who would start them."""
        present = {replica.member.endpoint.model for replica in status.replicas}
        empty = [name for name in self._supervisor.model_names if name not in present]
        return msgspec.structs.replace(status, scaled_to_zero=empty)

    async def _do(self, request: ToServer, report: Callable[[str], None]) -> FromServer:
        if isinstance(request, Ps):
            return PsReply(self._with_empty_models(await self._status()))
        if isinstance(request, Why):
            decisions = await self._why(request.request_id)
            if not decisions:
                raise NotFoundError(
                    f"nothing is known of a request {request.request_id!r}",
                    hint="the latest requests are remembered; the id is in the x-request-id header",
                )
            return WhyReply(decisions)

        def tell(line: str) -> None:
            log.info("%s", line)
            report(line)

        try:
            supervisor = self._supervisor
            if isinstance(request, Scale):
                line = await supervisor.scale(request.model, request.replicas, tell, request.role)
            elif isinstance(request, Rollout):
                line = await supervisor.roll_out(request.model, request.folder, request.approver, tell)
            elif isinstance(request, Rollback):
                line = await supervisor.roll_back(request.model, request.approver, tell)
            else:
                line = await supervisor.reload(request.target, tell)
        except HeadraceError as error:
            log.warning("%s failed: %s", type(request).__name__.lower(), error.message)
            raise
        log.info("%s", line)
        return Done(line)


def claim(path: Path) -> socket.socket:
    """A listening socket at ``path`` that only this user can open, in a folder of this user's own.

    A socket that nobody answers on any more is replaced. Raises UsageError, and touches nothing then.
    """
    _check_folder(path.parent)
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
        sock.listen(16)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {path}: {error}", hint=_HINT) from error
    sock.setblocking(False)
    return sock


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UsageError(f"no folder for the control socket: {error}", hint=_HINT) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UsageError(
            f"{folder} must be a folder that this user owns and nobody else can write to, for the control "
            f"socket; it belongs to user {found.st_uid}, mode {stat.filemode(found.st_mode)}",
            hint=_HINT,
        )


def _remove_stale(path: Path) -> None:
    """Removes a socket whose server is gone; UsageError where there is a live one, or something else."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise UsageError(f"{path} is in the way of the control socket", hint="move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"the control socket {path} cannot be had: {error}", hint=_HINT) from error
        else:
            raise UsageError(
                f"another server answers on the control socket {path}: `headrace ps` will reach that one",
                hint="give this one another port",
            )


async def _read_request(reader: asyncio.StreamReader) -> ToServer | None:
    """One message; None where the client leaves without one. InvalidRequestError for anything else."""
    decoder: FrameDecoder[ToServer] = FrameDecoder(ToServer)
    left = MAX_REQUEST_BYTES
    while data := await reader.read(left):
        left -= len(data)
        try:
            messages = decoder.feed(data)
        except FrameError as error:
            raise InvalidRequestError(f"not a request of ours: {error}") from error
        if messages:
            return messages[0]
        if not left:
            raise InvalidRequestError(f"a request may have at most {MAX_REQUEST_BYTES} bytes")
    return None


def _write(writer: asyncio.StreamWriter, message: FromServer) -> None:
    """Sends without waiting; a client that has left, or does not read, is not told."""
    transport = writer.transport
    if transport.is_closing():
        return
    writer.write(encode_frame(message))
    if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
        transport.abort()


def _refusal(error: HeadraceError) -> Refusal:
    return Refusal(Failed("", error.status, error.kind, error.message, error.param, error.code), error.hint)
