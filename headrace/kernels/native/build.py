"""From a C++ file to a shared object that can be loaded.

A library's name holds the digest of all that went into it: source, headers beside it, flags, compiler,
CPU. So a build is never stale and never repeated, and two versions are never loaded under one name (the
loader would hand back the first). Beside it lies the digest of its own contents (kept.py): one that was
damaged on the disk is built again, as loading it could end the process.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import CompileError, CompilerMissingError
from headrace.core.leftovers import owner, prefix_of, sweep
from headrace.core.words import describe_exit
from headrace.kernels.native.kept import check_loads, is_whole, keep

log = logging.getLogger("headrace.kernels")

VERSION_S = 30.0
"""A compiler that does not say its version in this time is none."""

INCLUDE = Path(__file__).parent
"""Where headrace_kernel.h is."""

STANDARD_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-std=c++17",
    "-shared",
    "-fPIC",
    # a kernel's own names win over the process's: a function called ``step`` is glibc's otherwise
    "-Wl,-Bsymbolic",
)
_COMPILERS = ("g++", "clang++")
# options that choose how code is generated; none that names a file, loads a plugin or talks to the linker
_ALLOWED_FLAG = re.compile(
    r"-(O[0-3sg]|m[\w.=-]+|f(?!plugin|dump|profile|save|lto|sanitize)[\w=-]+|D\w+(=[\w.+-]*)?|W[\w=-]+|std=[\w+]+)"
)
# these make the loader switch denormal numbers off, or rounding to another width, for the whole process
_CHANGES_PROCESS = re.compile(r"-(Ofast|ffast-math|funsafe-math-optimizations|mdaz-ftz|mpc\d+)")
_ERROR_LINES = 12
_NO_ROOM = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File size limit exceeded",
}
_HEADERS = {".h", ".hh", ".hpp", ".inc"}


def compile_kernel(source: Path, flags: Sequence[str], folder: Path, *, timeout_s: float = 600.0) -> Path:
    """The shared object of ``source`` in ``folder``, compiled now unless it is there already.

    ``flags`` come after STANDARD_FLAGS. The compiler is $CXX, else g++, else clang++; it runs at low
    priority, since a server may be computing beside it. Raises CompilerMissingError; CompileError with the
    compiler's first lines, for a flag that is not allowed, when it takes longer than ``timeout_s``, and for
    a library that crashes when it is loaded; OSError where ``folder`` cannot be written.
    """
    check_flags(flags)
    compiler = find_compiler()
    target = folder / f"{source.stem}-{_digest(source, flags, compiler)}.so"
    if is_whole(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)  # what ended runs were building
    log.info("compiling %s", source.name)
    with tempfile.TemporaryDirectory(
        prefix=f".build-{owner()}-", dir=folder, ignore_cleanup_errors=True
    ) as scratch:
        built = Path(scratch) / target.name
        command = compile_command(compiler, source, built, flags)
        nice = shutil.which("nice")
        if nice is not None:
            command = [nice, "-n", "10", *command]
        status, output = _run(command, scratch, timeout_s)
        if status is None:
            raise CompileError(f"{source.name}: the compiler took longer than {timeout_s:g} s")
        if not Path(scratch).is_dir():
            raise OSError(errno.ENOENT, "it was removed during the build")
        if status != 0:
            for number, words in _NO_ROOM.items():
                if words in output:
                    raise OSError(number, os.strerror(number))
            said = first_errors(output.replace(f"{source.parent}/", "")).strip()
            if not said:
                said = f"{compiler[0]} said nothing ({describe_exit(status)})"
            raise CompileError(f"{source.name} does not compile:\n{said}")
        if not built.is_file():
            raise CompileError(f"{source.name}: {compiler[0]} reported success and wrote no library")
        check_loads(built, f"the library that {compiler[0]} made of {source.name}")
        keep(built, target)
    return target


def compile_command(compiler: Sequence[str], source: Path, target: Path, flags: Sequence[str]) -> list[str]:
    """The command line, also for whoever runs the compiler in a cage of their own."""
    return [*compiler, *STANDARD_FLAGS, *flags, f"-I{INCLUDE}", str(source), "-o", str(target)]


def find_compiler() -> list[str]:
    """The compiler's command: $CXX (which may have arguments), else g++ or clang++.

    Raises CompilerMissingError.
    """
    words = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(words)
    except ValueError as error:
        raise CompilerMissingError(
            f"no C++ compiler: CXX={words} cannot be split into words: {error}",
            hint="name a compiler in CXX as a shell would read it",
        ) from None
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    raise CompilerMissingError(
        f"no C++ compiler: {' or '.join([chosen[0]] if chosen else _COMPILERS)} is not on the PATH",
        hint="install g++ (apt-get install g++), or name a compiler in CXX",
    )


def check_flags(flags: Sequence[str]) -> None:
    """Raises CompileError for a flag beside those that choose how code is generated."""
    for flag in flags:
        if _CHANGES_PROCESS.fullmatch(flag):
            raise CompileError(
                f"flag {flag} changes floating-point arithmetic in the whole process",
                hint="-fno-math-errno, -fno-trapping-math and -fassociative-math loosen it for one file",
            )
        if not _ALLOWED_FLAG.fullmatch(flag):
            raise CompileError(f"flag {flag!r} is not allowed: only -O, -m, -f, -D, -W and -std= options are")


def cpu_features() -> frozenset[str]:
    """Words of /proc/cpuinfo's flags; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def compiler_version(compiler: Sequence[str]) -> str:
    """The first line of ``--version``. Raises CompileError when it does not come."""
    with tempfile.TemporaryDirectory(prefix=prefix_of("compiler")) as scratch:
        status, output = _run([*compiler, "--version"], scratch, VERSION_S)
    if status is None:
        raise CompileError(
            f"{' '.join(compiler)} --version gave no answer in {VERSION_S:g} s",
            hint="name a compiler that works in CXX",
        )
    return output.partition("\n")[0]


def first_errors(output: str) -> str:
    """The first lines from the first error on, shortened."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if "error" in line), 0)
    return "\n".join(line[:300] for line in lines[start : start + _ERROR_LINES])


def _digest(source: Path, flags: Sequence[str], compiler: Sequence[str]) -> str:
    digest = hashlib.sha256()
    words = (*STANDARD_FLAGS, *flags, "", *compiler, compiler_version(compiler), *sorted(cpu_features()))
    digest.update("\0".join(words).encode())
    headers = sorted(path for path in source.parent.iterdir() if path.suffix in _HEADERS)
    for path in (source, *headers, INCLUDE / "headrace_kernel.h"):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]


def _run(command: Sequence[str], scratch: str, timeout_s: float) -> tuple[int | None, str]:
    """Exit status and what it printed; None when it had to be stopped. No include paths come from the user's
    environment, and no translated messages."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": scratch},
            start_new_session=True,
        )
    except OSError as error:
        raise CompileError(
            f"the compiler {command[0]} cannot be run: {error.strerror}",
            hint="name a compiler that works in CXX",
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the driver
            if isinstance(error, subprocess.TimeoutExpired):
                return None, ""
            raise
    return process.returncode, output
