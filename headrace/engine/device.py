"""Where an engine computes, in torch's words and in people's."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

from headrace.core.errors import UsageError


def find_device(asked: str) -> torch.device:
    """Raises UsageError where there is none of the kind."""
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if asked == "cuda":
        raise UsageError(
            "--device cuda: torch sees no CUDA device",
            hint="use --device cpu, or install a CUDA build of torch",
            param="--device",
        )
    return torch.device("cpu")


def describe_device(device: torch.device, num_threads: int) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({num_threads} threads)"


def hardware_class(device: torch.device, num_threads: int) -> str:
    """The class of machine in words: replicas of one class are expected to be equally fast."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"cpu x{num_threads} {name}"
