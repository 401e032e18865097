"""A candidate's folder taken in, checked and compiled, in the cage: a compiler reads what it is told."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.core.errors import CompileError, CompilerMissingError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.build import (
    INCLUDE,
    STANDARD_FLAGS,
    check_flags,
    compiler_version,
    cpu_features,
    find_compiler,
    first_errors,
)
from headrace.models.cache import cache_folder
from headrace.optimize.digest import ENTRY_FILE, candidate_digest, candidate_files
from headrace.optimize.judge.problem import Problem
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.sandbox import GIB, MIB, Cage, Caged, Limits, Sandbox, readable
from headrace.optimize.judge.source_check import check_object, check_sources
from headrace.optimize.records import Target

_MAX_FILE = 1 * MIB
_MAX_FILES = 64
_MOST_ROWS = 4096
"""More than that in one call is not looked at, but for a target that wants it: the judge has to hold it."""
_OUT_OF_MEMORY = ("out of memory", "memory exhausted", "Cannot allocate memory", "std::bad_alloc")
_COMPILE = 'command=$1; shift; "$command" "$@" -o /tmp/kernel.so >&2 && cat /tmp/kernel.so'


@dataclass(frozen=True)
class Taken:
    """The judge's own copy of a candidate: what is judged is what was digested."""

    folder: Path
    entry: KernelEntry
    digest: str


@dataclass(frozen=True)
class Built:
    """A candidate that compiled: the judge's copy, its shared object, and what it must compute."""

    taken: Taken
    library: Path
    problem: Problem
    sandbox: Sandbox
    build_s: float


def take(source: Path, target: Target, copy: Path) -> Taken:
    """Copies the candidate's files. Raises Rejected for what is malformed or forbidden."""
    files = candidate_files(source)
    if ENTRY_FILE not in files:
        raise Rejected("malformed", f"no {ENTRY_FILE}")
    if any(not name.isprintable() for name in files):
        raise Rejected("malformed", "a file's name is not printable UTF-8")
    if len(files) > _MAX_FILES or any((source / name).stat().st_size > _MAX_FILE for name in files):
        raise Rejected("malformed", f"more than {_MAX_FILES} files, or one of more than 1 MiB")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy / name)
    try:
        entry = msgspec.json.decode((copy / ENTRY_FILE).read_bytes(), type=KernelEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected("malformed", f"{ENTRY_FILE}: {error}") from None
    _check_entry(entry, target, files)
    check_sources(copy, files)
    return Taken(copy, entry, candidate_digest(copy))


def compile_caged(sandbox: Sandbox, taken: Taken, folder: Path, *, timeout_s: float) -> tuple[Path, float]:
    """The shared object, in ``folder``, and how long the compiler took.

    Raises Rejected: no_compiler, compile_error, timed_out, out_of_memory, out_of_limits, forbidden.
    """
    try:
        compiler = find_compiler()
        check_flags(taken.entry.flags)
    except CompilerMissingError as error:
        raise Rejected("no_compiler", error.message) from None
    except CompileError as error:
        raise Rejected("compile_error", error.message) from None
    readable(taken.folder)
    kept = _kept(taken, compiler)
    if kept.exists():
        return kept, 0.0
    built = folder / f"kernel-{taken.digest[:16]}.so"
    flags = [*STANDARD_FLAGS, *taken.entry.flags, "-I/include", f"/candidate/{taken.entry.source}"]
    shell = ["/bin/sh", "-c", _COMPILE, "sh", *compiler, *flags]
    limits = Limits(memory=3 * GIB, disk=64 * MIB, cpu_s=int(timeout_s) + 5, processes=32)
    cage = Cage(limits, {taken.folder: "/candidate", INCLUDE: "/include"})
    began = time.monotonic()
    # both go to files, whose size the cage limits
    with built.open("wb") as output, tempfile.TemporaryFile() as errors:
        with Caged(sandbox, cage, shell, stdout=output, stderr=errors) as child:
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise Rejected("timed_out", f"the compiler took longer than {timeout_s:g} s") from None
        errors.seek(0)
        text = errors.read(MIB).decode(errors="replace")
    if child.returncode != 0:
        if any(words in text for words in _OUT_OF_MEMORY):
            raise Rejected("out_of_memory", "the compiler ran out of its 3 GiB")
        if "No space left" in text or "File size limit" in text or "file too large" in text.lower():
            raise Rejected("out_of_limits", "the compiler's output is larger than 64 MiB")
        raise Rejected("compile_error", first_errors(text) or f"the compiler ended with {child.returncode}")
    built.chmod(0o755)
    check_object(built)
    scratch = kept.with_name(f".{kept.name}-{os.getpid()}")
    shutil.copyfile(built, scratch)
    scratch.chmod(0o755)
    os.replace(scratch, kept)
    return kept, time.monotonic() - began


def _kept(taken: Taken, compiler: list[str]) -> Path:
    """Where the shared object of these sources, this compiler and CPU is kept: it is built once for all the
    stages of a round."""
    words = [taken.digest, *STANDARD_FLAGS, *compiler, compiler_version(compiler), *sorted(cpu_features())]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()
    folder = cache_folder() / "judge" / "built"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{digest[:32]}.so"


def _check_entry(entry: KernelEntry, target: Target, files: list[str]) -> None:
    if entry.source not in files:
        raise Rejected("malformed", f"{ENTRY_FILE} names {entry.source}, which is not in the folder")
    if not target.module and entry.op != target.op:
        raise Rejected("malformed", f"it implements {entry.op}, wanted is {target.op}")
    if not set(target.formats) <= set(entry.weight_formats):
        formats, wanted = ", ".join(entry.weight_formats) or "no", ", ".join(target.formats)
        raise Rejected("malformed", f"it reads {formats} weights, wanted is {wanted}")
    if entry.batch_invariant and target.module:
        raise Rejected(
            "malformed", "it says batch_invariant, and a module's calls have no rows to tell apart"
        )
    if target.phase not in entry.phases or not set(entry.phases) <= {"prefill", "decode"}:
        raise Rejected("malformed", f"phases are {entry.phases}, wanted is {target.phase}")
    # with a kernel that is the same at any number of rows, all steps are float32
    needed = {"float32"} if entry.batch_invariant else set(target.activation_dtypes)
    missing = sorted(needed - set(entry.activation_dtypes))
    unknown = sorted(set(entry.activation_dtypes) - {"float32", "bfloat16"})
    if missing or unknown:
        raise Rejected("malformed", f"activation_dtypes: missing {missing}, unknown {unknown}")
    if not any(entry.covers_rows(shape.rows) for shape in target.shapes):
        raise Rejected("malformed", f"max_rows {entry.max_rows} covers none of the target's shapes")
    most = max(_MOST_ROWS, target.max_rows)
    if entry.max_rows > most:
        raise Rejected("malformed", f"max_rows {entry.max_rows} is more than {most}; 0 covers any number")
