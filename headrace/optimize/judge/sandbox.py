"""The cage that candidates are compiled and run in, and what it was seen to hold.

    outer   namespaces and an own root: bubblewrap where it is installed, else util-linux ``unshare`` and the
            script below; no network, no other processes, /usr read-only, the listed folders, a small /tmp
    inner   ``setpriv`` gives up every right, ``prlimit`` sets the limits
    runner  a filter over system calls (runner.c), around candidates only

Nothing is assumed: ``Sandbox.find`` runs a probe in the cage and keeps what really held.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from headrace.core.errors import UnavailableError
from headrace.core.leftovers import prefix_of

MIB = 1024**2
GIB = 1024**3

# what a compiler and a C program need to see of the machine
_SYSTEM = ("/usr", "/etc/ld.so.cache", "/etc/alternatives", "/dev/null", "/dev/urandom")
_LINKS = ("/bin", "/lib", "/lib64", "/lib32", "/sbin")
_TOOLS = ("setpriv", "prlimit")
_PROBE_S = 120.0
_NEEDED = ("network", "files", "read_only", "memory", "disk")
"""Without these nothing is run; without the others it is said."""

_MEANING = {
    "network": "no network",
    "signals": "no other process in sight",
    "files": "no files but /usr and its own",
    "read_only": "what it sees is read-only",
    "privileges": "no privileges",
    "memory": "memory",
    "disk": "disk",
    "processes": "processes",
}
_LIMITS = ("memory", "disk", "processes")

_ROOT_SCRIPT = r"""
set -eu
root=$1; shift
mount -t tmpfs -o mode=755,size=1m,nosuid cage "$root"
while [ "$1" != -- ]; do
    kind=$1 from=$2 to=$root$3; shift 3
    case $kind in
    bind)
        if [ -d "$from" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}"; : > "$to"; fi
        mount --bind "$from" "$to"
        case $from in /dev/*) ;; *) mount -o remount,bind,ro,nosuid,nodev "$to" ;; esac ;;
    link) mkdir -p "${to%/*}"; ln -s "$from" "$to" ;;
    scratch)
        mkdir -p "$to"
        mount -t tmpfs -o "mode=1777,size=$from,nr_inodes=4096,nosuid,nodev" scratch "$to" ;;
    esac
done
shift
mkdir -p "$root/proc" "$root/.old"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc" 2>/dev/null || true
cd "$root"
pivot_root . .old
umount -l .old
rmdir .old
mount -o remount,ro / 2>/dev/null || true
cd /tmp
exec "$@"
"""


@dataclass(frozen=True)
class Limits:
    """``memory``: address space of one process, bytes. ``disk``: all it can write. ``cpu_s``: CPU seconds.
    ``processes``: threads count as well."""

    memory: int = 4 * GIB
    disk: int = 64 * MIB
    cpu_s: int = 120
    processes: int = 64


@dataclass(frozen=True)
class Cage:
    """How one command is caged. ``show`` maps paths outside to where they are seen, read-only."""

    limits: Limits = Limits()
    show: Mapping[Path, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[int] = ()  # descriptors that the command inherits


class Sandbox:
    """One way to cage commands on this machine, and what it was seen to hold."""

    def __init__(self, method: str, held: Mapping[str, bool] | None = None) -> None:
        self.method = method
        self.held = dict(held or {})

    @staticmethod
    def find(probe: Path) -> Sandbox:
        """The best way that holds, as the runner at ``probe`` found it.

        Raises UnavailableError where nothing holds what must be held.
        """
        return _find(probe)

    @property
    def enough(self) -> bool:
        return all(self.held.get(name, False) for name in _NEEDED)

    def describe(self) -> str:
        """One line: the method, what it holds, and what it does not."""
        holds = [text for name, text in _MEANING.items() if self.held.get(name) and name not in _LIMITS]
        limited = [name for name in _LIMITS if self.held.get(name)]
        leaks = [text for name, text in _MEANING.items() if not self.held.get(name)]
        text = f"{self.method}: {', '.join(holds)}; limits on {', '.join(limited)}"
        return text + (f"; NOT held: {', '.join(leaks)}" if leaks else "")

    def command(self, cage: Cage, argv: Sequence[str], scratch_root: Path) -> list[str]:
        """``argv`` inside the cage. ``scratch_root`` is an empty folder of ours (unshare's mount point)."""
        binds = [(str(path), seen) for path, seen in cage.show.items()]
        system = [(path, path) for path in _SYSTEM if os.path.exists(path)]
        links = [(os.readlink(path), path) for path in _LINKS if os.path.islink(path)]
        system += [(path, path) for path in _LINKS if os.path.isdir(path) and not os.path.islink(path)]
        inner = self._inner(cage.limits) + list(argv)
        # the cage ends with whoever started it
        outer = [_tool("setpriv"), "--pdeathsig", "KILL"]
        if self.method == "bubblewrap":
            return outer + self._bubblewrap(cage, system + binds, links) + inner
        words: list[str] = []
        for source, target in links:
            words += ["link", source, target]
        words += ["scratch", str(cage.limits.disk), "/tmp"]
        for source, target in system + binds:
            words += ["bind", source, target]
        outer += [_tool("unshare"), "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]
        outer += ["--kill-child=KILL", "--propagation", "private"]
        if os.geteuid() != 0:
            outer += ["--user", "--map-root-user"]
        return [*outer, "/bin/sh", "-c", _ROOT_SCRIPT, "cage", str(scratch_root), *words, "--", *inner]

    def _bubblewrap(
        self, cage: Cage, binds: list[tuple[str, str]], links: list[tuple[str, str]]
    ) -> list[str]:
        words = [_tool("bwrap"), "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--die-with-parent", "--new-session"]
        if os.geteuid() == 0:
            for right in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
                words += ["--cap-add", right]
        else:
            words += ["--unshare-user", "--cap-drop", "ALL"]
        for source, target in links:
            words += ["--symlink", source, target]
        words += ["--size", str(cage.limits.disk), "--perms", "1777", "--tmpfs", "/tmp", "--proc", "/proc"]
        parents = {str(each) for _, target in binds for each in Path(target).parents} - {"/", "/tmp"}
        for parent in sorted(parents):  # it would make them for their owner only
            words += ["--perms", "0755", "--dir", parent]
        for source, target in binds:
            words += ["--dev-bind" if source.startswith("/dev/") else "--ro-bind", source, target]
        return [*words, "--remount-ro", "/", "--chdir", "/tmp", "--"]

    def _inner(self, limits: Limits) -> list[str]:
        words = [_tool("setpriv")]
        if os.geteuid() == 0:
            # a user of its own, so that the limit on processes counts its processes alone
            user = str(700_000_000 + secrets.randbelow(100_000_000))
            words += [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        elif self.method != "bubblewrap":
            words += ["--securebits=+noroot,+noroot_locked"]
        words += ["--inh-caps=-all", "--no-new-privs", "--pdeathsig=KILL"]
        if self.method != "bubblewrap" or os.geteuid() == 0:
            words += ["--bounding-set=-all"]
        words += [_tool("prlimit"), f"--as={limits.memory}", f"--fsize={limits.disk}", "--core=0"]
        return [*words, f"--cpu={limits.cpu_s}", f"--nproc={limits.processes}", "--nofile=256"]


class Caged(subprocess.Popen[bytes]):
    """A caged command. Standard output and error come through one pipe; ``close`` ends all of it."""

    def __init__(self, sandbox: Sandbox, cage: Cage, argv: Sequence[str], **options: object) -> None:
        self._root = Path(tempfile.mkdtemp(prefix=prefix_of("cage")))
        environment = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "LC_ALL": "C.UTF-8",
        }
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.STDOUT)
        super().__init__(  # type: ignore[call-overload]
            sandbox.command(cage, argv, self._root),
            env={**environment, **cage.environment},
            pass_fds=tuple(cage.keep),
            start_new_session=True,
            cwd="/",
            **options,
        )

    def close(self) -> None:
        """Kills whatever is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()


@lru_cache
def _find(probe: Path) -> Sandbox:
    tried = []
    for method, tool in (("bubblewrap", "bwrap"), ("unshare", "unshare")):
        missing = [name for name in (tool, *_TOOLS) if shutil.which(name) is None]
        if missing:
            tried.append(f"{method}: {', '.join(missing)} not installed")
            continue
        held, said = _probe(Sandbox(method), probe)
        sandbox = Sandbox(method, held)
        if sandbox.enough:
            return sandbox
        tried.append(sandbox.describe() if held else f"{method}: {said}")
    raise UnavailableError(
        f"nothing on this machine holds untrusted code: {'; '.join(tried)}",
        hint="install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1)",
    )


def _probe(sandbox: Sandbox, runner: Path) -> tuple[dict[str, bool], str]:
    limits = Limits(memory=GIB, disk=16 * MIB, cpu_s=10)
    with socket.socket() as listener, tempfile.NamedTemporaryFile() as outside:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        hidden = [outside.name, os.path.expanduser("~"), str(Path(__file__))]
        words = ["/runner", "probe", str(listener.getsockname()[1]), str(os.getpid()), *hidden]
        with Caged(sandbox, Cage(limits, {runner: "/runner"}), words) as child:
            try:
                output, _ = child.communicate(timeout=_PROBE_S)
            except subprocess.TimeoutExpired:
                return {}, "the probe hung"
    lines = [line.split() for line in output.decode(errors="replace").splitlines()]
    held = {words[0]: words[1] == "1" for words in lines if len(words) == 2 and words[0] in _MEANING}
    return held, output.decode(errors="replace").strip()[-200:]


def _tool(name: str) -> str:
    return shutil.which(name) or f"/usr/bin/{name}"


def readable(path: Path) -> None:
    """Lets the cage's user read a folder of ours and all in it."""
    for each in (path, *path.rglob("*")):
        each.chmod(0o755 if each.is_dir() or os.access(each, os.X_OK) else 0o644)


def is_linux() -> bool:
    return sys.platform == "linux"
