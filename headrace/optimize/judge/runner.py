"""The caged process that runs a candidate, and what its words mean.

The parent sends three numbers, waits for one struct, and holds the clock. What the runner says can be forged
by the candidate inside it; it decides how a failure is named, never that a result is right.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

from headrace.core.engine_environment import ENGINE_ENVIRONMENT
from headrace.core.errors import StartupError
from headrace.kernels.native.build import INCLUDE
from headrace.models.cache import cache_folder
from headrace.optimize.judge.layout import INPUTS, OUTPUTS, Layout
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.sandbox import GIB, MIB, Cage, Caged, Limits, Sandbox
from headrace.optimize.records import Reason

SOURCE = Path(__file__).with_name("runner.c")
MAX_OUTPUT = 64 * 1024
"""Bytes that a candidate may print in all."""

_LOAD, _PACK, _RUN, _SNAP = 1, 2, 3, 4
_DONE, _ERROR, _SIGNAL, _TRAP = 1, 2, 3, 4
_REPLY = struct.Struct("=6q208s")
_FILTER = 1

_PROCESS_CALLS = {56: "clone", 57: "fork", 58: "vfork", 59: "execve", 322: "execveat"}
_NETWORK_CALLS = {41: "socket", 42: "connect", 44: "sendto", 49: "bind", 53: "socketpair"}
_FILE_CALLS = {
    2: "open",
    257: "openat",
    437: "openat2",
    85: "creat",
    83: "mkdir",
    258: "mkdirat",
    87: "unlink",
    263: "unlinkat",
    82: "rename",
    316: "renameat2",
    76: "truncate",
    77: "ftruncate",
    285: "fallocate",
    90: "chmod",
    91: "fchmod",
    86: "link",
    88: "symlink",
    265: "linkat",
    266: "symlinkat",
    133: "mknod",
    319: "memfd_create",
}
_MEMORY_CALLS = {9: "mmap", 10: "mprotect", 13: "sigaction", 216: "remap_file_pages", 329: "pkey_mprotect"}
_TIMER_CALLS = {37: "alarm", 38: "setitimer", 160: "setrlimit", 222: "timer_create"}


def build_runner() -> Path:
    """The runner's executable, compiled once per version of its source. Raises Rejected("no_compiler")."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Rejected("no_compiler", "no C compiler: cc, gcc or clang is not on the PATH")
    digest = hashlib.sha256(SOURCE.read_bytes() + (INCLUDE / "headrace_kernel.h").read_bytes())
    target = cache_folder() / "judge" / f"runner-{digest.hexdigest()[:24]}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}-{os.getpid()}")
    command = [
        compiler,
        "-O2",
        "-rdynamic",
        f"-I{INCLUDE}",
        str(SOURCE),
        "-o",
        str(scratch),
        "-ldl",
        "-lm",
        "-pthread",
    ]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        raise StartupError(f"the judge's runner does not compile: {result.stderr[:1000]}")
    scratch.chmod(0o755)
    os.replace(scratch, target)
    return target


class Runner:
    """One candidate, loaded, over the calls of one layout. A context manager."""

    def __init__(
        self,
        sandbox: Sandbox,
        executable: Path,
        built: Path,
        layout: Layout,
        *,
        cpus: frozenset[int] = frozenset(),
        perturb: bool = False,
        timeout_s: float = 60.0,
        memory: int = 4 * GIB,
    ) -> None:
        """``cpus`` it is pinned to. ``perturb``: fresh heap memory holds garbage instead of zeros.
        ``timeout_s`` is for loading and packing; ``memory`` what it may take beside the layout's."""
        self.layout = layout
        self.timeout_s = timeout_s
        self.printed = 0
        command_read, self._commands = os.pipe2(os.O_CLOEXEC)
        self._replies, reply_write = os.pipe2(os.O_CLOEXEC)
        memories = (layout.inputs, layout.outputs, layout.table)
        keep = [*(each.descriptor for each in memories), command_read, reply_write]
        space = memory + sum(each.size for each in memories) + 2 * layout.num_sets * layout.weight_bytes
        limits = Limits(memory=space, disk=16 * MIB, cpu_s=300, processes=32)
        environment = {**ENGINE_ENVIRONMENT, "OMP_NUM_THREADS": str(layout.threads)}
        if perturb:
            environment["MALLOC_PERTURB_"] = "1"
        cage = Cage(limits, {executable: "/runner", built: "/kernel.so"}, environment, keep)
        words = ["/runner", *map(str, keep), str(_FILTER), "/kernel.so"]
        taskset = shutil.which("taskset")
        if cpus and taskset is not None:
            words = [taskset, "--cpu-list", ",".join(map(str, sorted(cpus))), *words]
        self._child = Caged(sandbox, cage, words)
        os.close(command_read)
        os.close(reply_write)
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        os.set_blocking(self._replies, False)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        os.close(self._commands)
        os.close(self._replies)

    def load(self) -> bool:
        """dlopen; whether the candidate packs weights."""
        return bool(self._ask(_LOAD, 0, 0, self.timeout_s)[2])

    def pack(self) -> int:
        """Every weight set as it is now; bytes of one packed set, 0 if the candidate does not pack."""
        return self._ask(_PACK, 0, 0, self.timeout_s)[2]

    def run(self, first: int, count: int, timeout_s: float) -> float:
        """Calls in order; seconds by the parent's clock."""
        began = time.perf_counter()
        self._ask(_RUN, first, count, timeout_s)
        return time.perf_counter() - began

    def snap(self, index: int, timeout_s: float) -> None:
        """One call whose outputs are copied the moment it returns."""
        self._ask(_SNAP, index, 0, timeout_s)

    def _ask(self, command: int, first: int, second: int, timeout_s: float) -> tuple[int, ...]:
        if select.select([self._replies], [], [], 0)[0]:
            self._gone_or("environment_touched", "it wrote into the judge's own pipe")
        try:
            os.write(self._commands, struct.pack("=3q", command, first, second))
        except OSError as error:
            assert error.errno == errno.EPIPE, error
            raise self._ended() from None
        reply = self._receive(timeout_s)
        said, code, a, _, _, changed, text = reply
        if said != _DONE:
            raise self._rejection(reply)
        if changed:
            raise Rejected(
                "environment_touched", "it returned with another rounding mode or other exception masks"
            )
        if code == 1 and command == _PACK:
            raise Rejected("declined", "it does not pack the target's weights")
        if code == 1:
            raise Rejected(
                "declined", f"HR_NOT_MINE for {self.layout.cases[a].name}, which it declares to cover"
            )
        if code != 0:
            what = text.split(b"\0")[0].decode(errors="replace") or "hr_run"
            raise Rejected("crashed", f"{what} returned {code}")
        return reply[:6]

    def _receive(self, timeout_s: float) -> tuple[int, int, int, int, int, int, bytes]:
        """The next reply. What the candidate prints meanwhile is counted."""
        assert self._child.stdout is not None
        output, deadline, data = self._child.stdout.fileno(), time.monotonic() + timeout_s, b""
        watched = [self._replies, output]
        while len(data) < _REPLY.size:
            left = deadline - time.monotonic()
            ready = select.select(watched, [], [], max(0.0, left))[0]
            if not ready:
                raise Rejected("timed_out", f"no answer within {timeout_s:.3g} s")
            if output in ready and not self._drain(output):
                watched.remove(output)
            if self._replies in ready:
                part = os.read(self._replies, _REPLY.size - len(data))
                if not part:
                    raise self._ended()
                data += part
        said, code, a, b, failed, changed, text = _REPLY.unpack(data)
        return said, code, a, b, failed, changed, text

    def _drain(self, output: int) -> bool:
        try:
            part = os.read(output, 65536)
        except BlockingIOError:
            return True
        self.printed += len(part)
        if self.printed > MAX_OUTPUT:
            raise Rejected("out_of_limits", f"it printed more than {MAX_OUTPUT // 1024} KiB")
        return bool(part)

    def _rejection(self, reply: tuple[int, int, int, int, int, int, bytes]) -> Rejected:
        said, code, a, b, failed, _, raw = reply
        text = raw.split(b"\0")[0].decode(errors="replace")
        if said == _ERROR:
            return Rejected("out_of_memory" if failed else "malformed", text)
        if said == _TRAP:
            return _trapped(code, text)
        if code == signal.SIGSEGV and a:
            return self._bad_access(a, b)
        if failed:
            return Rejected(
                "out_of_memory", f"{failed / GIB:.3g} GiB were refused, then {_signal_name(code)}"
            )
        if code == signal.SIGXFSZ:
            return Rejected("out_of_limits", "it wrote more to disk than it may")
        if code == signal.SIGXCPU:
            return Rejected("timed_out", "it used up its CPU time")
        return Rejected("crashed", _signal_name(code))

    def _bad_access(self, where: int, offset: int) -> Rejected:
        if where in (INPUTS, OUTPUTS):
            slot, inside = self.layout.find(where, offset)
            if inside and where == INPUTS:
                return Rejected("input_changed", f"it wrote to {slot}, which is only read")
            return Rejected("out_of_bounds", f"it read or wrote beside {slot}")
        return Rejected("out_of_bounds", "it wrote to its packed weights, or read or wrote beside them")

    def _gone_or(self, reason: Reason, detail: str) -> None:
        data = os.read(self._replies, _REPLY.size)
        if not data:
            raise self._ended()
        if len(data) == _REPLY.size:
            reply = _REPLY.unpack(data)
            if reply[0] in (_SIGNAL, _TRAP):  # a thread of its own failed between two calls
                raise self._rejection(reply)
        raise Rejected(reason, detail)

    def _ended(self) -> Rejected:
        """What the end of the process says, when it said nothing itself."""
        assert self._child.stdout is not None
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            return Rejected("environment_touched", "it closed the judge's pipe")
        code = self._child.returncode
        number = -code if code < 0 else code - 128
        if number == signal.SIGSYS:
            return Rejected("forbidden", "a system call that no kernel needs")
        if number == signal.SIGKILL:
            return Rejected("out_of_memory", "the system killed it")
        if number in (signal.SIGXCPU, signal.SIGXFSZ):
            return Rejected(
                "timed_out" if number == signal.SIGXCPU else "out_of_limits", _signal_name(number)
            )
        if number > 0:
            return Rejected("crashed", _signal_name(number))
        words = b""
        with contextlib.suppress(OSError):
            words = os.read(self._child.stdout.fileno(), 400)
        return Rejected(
            "crashed", f"it ended the process with code {code} {words.decode(errors='replace')}".strip()
        )


def _trapped(number: int, path: str) -> Rejected:
    if number in _PROCESS_CALLS:
        return Rejected("out_of_limits", f"it starts processes ({_PROCESS_CALLS[number]})")
    if number in _NETWORK_CALLS:
        return Rejected("forbidden", f"it tries the network ({_NETWORK_CALLS[number]})")
    if number in _FILE_CALLS:
        name = _FILE_CALLS[number]
        if path.startswith(("/tmp", "/dev/shm")) or not path.startswith("/"):
            return Rejected("out_of_limits", f"it writes to disk ({name} {path})".replace(" )", ")"))
        return Rejected("environment_touched", f"it changes files ({name} {path})")
    if number in _MEMORY_CALLS:
        return Rejected(
            "environment_touched", f"it changes code or signal handlers ({_MEMORY_CALLS[number]})"
        )
    if number in _TIMER_CALLS:
        return Rejected("environment_touched", f"it changes timers or limits ({_TIMER_CALLS[number]})")
    return Rejected("forbidden", f"system call {number}, which no kernel needs")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
