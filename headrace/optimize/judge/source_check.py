"""What can be seen without running a candidate: sources that reach for more than a kernel needs.

It is no defence by itself, since text can be disguised; the cage is. It rejects early and by name what the
cage would only make fail, and what would pass for a kernel: handing the work back to torch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from headrace.optimize.judge.rejected import Rejected


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HEADERS = _words(
    """
    algorithm array atomic bit bitset cassert cerrno cfenv cfloat chrono cinttypes climits cmath
    complex condition_variable cstdarg cstddef cstdint cstdio cstdlib cstring ctime exception
    fstream functional initializer_list iomanip iostream iterator limits list map memory mutex new
    numeric ostream random shared_mutex sstream stdexcept string string_view thread tuple
    type_traits unordered_map unordered_set utility valarray vector assert.h errno.h fenv.h float.h
    immintrin.h inttypes.h limits.h linux/futex.h math.h omp.h pthread.h sched.h signal.h stdalign.h
    stdarg.h stdatomic.h stdbool.h stddef.h stdint.h stdio.h stdlib.h string.h time.h unistd.h
    x86intrin.h xmmintrin.h emmintrin.h arm_neon.h arm_sve.h sys/mman.h sys/syscall.h sys/types.h
    sys/stat.h sys/time.h sys/wait.h sys/socket.h sys/resource.h sys/prctl.h netinet/in.h
    arpa/inet.h fcntl.h headrace_kernel.h
    """
)
_INCLUDE = re.compile(
    r"^[ \t]*(?:#|%:|\?\?=)[ \t]*(include_next|include|import|embed)\b[ \t]*(.*)$", re.MULTILINE
)
_WORDS = {
    r"\b(torch|at|c10|aten)\s*::": "calls torch",
    r"\b(mkldnn|dnnl|cblas_\w+|openblas\w*)\b": "calls a library of kernels",
    r"\bdl(open|mopen|sym|vsym|_iterate_phdr)\b": "looks into other libraries",
    r"\b(Py_|PyObject|PyRun_)\w*": "calls Python",
    r"\b(mprotect|pkey_mprotect|process_vm_\w+|ptrace)\b": "changes memory that is not its own",
    r"\bsyscall\b(?=[^;]*\"|\\n)|\bint\s+\$0x80|\bsysenter\b": "makes system calls of its own",
    r"\.incbin\b": "takes in another file",
    r"/proc/|/dev/mem|/sys/": "reads the machine's state",
}
_IMPORTS = _words(
    """
    dlopen dlmopen dlsym dlvsym dl_iterate_phdr mprotect pkey_mprotect ptrace process_vm_readv
    process_vm_writev _dl_sym __libc_dlopen_mode __libc_dlsym setcontext makecontext
    """
)
_TAKEN_NAMES = _words(
    """
    clock_gettime clock gettimeofday time times omp_get_wtime clock_getres timespec_get
    __vdso_clock_gettime read write send recv malloc calloc realloc free mmap munmap mprotect memcpy
    memset memmove pthread_create sched_yield nanosleep usleep sigaction signal _exit exit abort
    main dlopen dlsym open openat
    """
)


def check_sources(folder: Path, files: Sequence[str]) -> None:
    """Raises Rejected("forbidden") with file and line."""
    for name in files:
        if name.endswith(".json"):
            continue
        text = _without_comments((folder / name).read_text(errors="replace"))
        for match in _INCLUDE.finditer(text):
            _check_include(match, text, name, files)
        for pattern, what in _WORDS.items():
            found = re.search(pattern, text)
            if found is not None:
                raise Rejected("forbidden", f"{_where(name, text, found)}: {what} ({found.group(0).strip()})")


def check_object(path: Path) -> None:
    """The same for the names that a shared object takes from others and gives to them."""
    taken, given = _symbols(path.read_bytes())
    wanted = sorted(taken & _IMPORTS)
    if wanted:
        raise Rejected("forbidden", f"calls {', '.join(wanted)}, which no kernel needs")
    stolen = sorted(given & _TAKEN_NAMES)
    if stolen:
        raise Rejected("forbidden", f"defines {', '.join(stolen)}: names of the C library, clocks among them")


def _check_include(match: re.Match[str], text: str, name: str, files: Sequence[str]) -> None:
    kind, what = match.group(1), match.group(2).strip()
    where = _where(name, text, match)
    if kind != "include" or len(what) < 3 or what[0] not in '<"':
        raise Rejected("forbidden", f"{where}: #{kind} {what[:80]} is not a plain include")
    path = what[1 : what.find(">" if what[0] == "<" else '"', 1)]
    if path in _HEADERS or path.removesuffix(".h") + ".h" in _HEADERS or path.endswith("intrin.h"):
        return
    if what[0] == '"' and ".." not in path and not path.startswith("/"):
        beside = (Path(name).parent / path).as_posix()
        if beside in files:
            return
    raise Rejected("forbidden", f"{where}: includes {path}, which is neither its own nor a standard header")


def _without_comments(text: str) -> str:
    """Comments blanked and lines joined where the compiler would, line numbers kept where possible."""
    text = text.replace("\\\r\n", "").replace("\\\n", "")
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')", re.DOTALL)
    return pattern.sub(lambda m: m.group(1) or "\n" * m.group(0).count("\n") or " ", text)


def _where(name: str, text: str, match: re.Match[str]) -> str:
    return f"{name}:{text.count(chr(10), 0, match.start()) + 1}"


def _symbols(data: bytes) -> tuple[set[str], set[str]]:
    """Undefined and defined names of an ELF object's dynamic symbol table (64 bit, little endian)."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise Rejected("malformed", "the compiler's output is no 64-bit ELF object")
    taken: set[str] = set()
    given: set[str] = set()
    start = struct.unpack_from("<Q", data, 0x28)[0]
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * index) for index in range(count)]
    for section in sections:
        if section[1] != 11:  # SHT_DYNSYM
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name_at, _, _, index = struct.unpack_from("<IBBH", data, at)
            end = data.index(b"\0", names + name_at)
            name = data[names + name_at : end].decode(errors="replace")
            (given if index else taken).add(name)
    return taken, given
