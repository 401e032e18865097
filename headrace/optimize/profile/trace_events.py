"""A torch profiler trace (Chrome's JSON) as calls that contain one another, and the steps they belong to.

cat                             what becomes of it
cpu_op                          an op; ops inside it are its own business
python_function "nn.Module: …"  a module around ops, where the trace was taken with modules
user_annotation                 a step, when its name is one of STEPS; else a span around ops
cuda_runtime, cuda_driver       the launch that a kernel's ``correlation`` points to
kernel, gpu_memcpy, gpu_memset  work on the device, found again at its launch
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.errors import UsageError
from headrace.optimize.records import Phase

_MODULE = "nn.Module: "
_TICK_S = 1e-9  # the clock's; a call that begins when another ends is not inside it
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_INSTANCE = re.compile(r"_(\d+)$")
_LAYER = re.compile(r"(Layer|Block)$")
_TOKENS = re.compile(r"sq(\d+)")
# vLLM (two generations of names), SGLang, torch's own schedule
STEPS = (
    re.compile(r"execute_context_\d+\((?P<prompt>\d+)\)_generation_\d+\((?P<decode>\d+)\)"),
    re.compile(r"execute_\d+_context_\d+\((?P<prompts>[^)]*)\)_generation_\d+\((?P<decodes>[^)]*)\)"),
    re.compile(r"step\[(?P<mode>\w+) bs=(?P<batch>\d+)(?: toks=(?P<tokens>\d+))?"),
    re.compile(r"ProfilerStep#\d+"),
)


class Event(msgspec.Struct):
    """One record of the trace; ``ts`` and ``dur`` in microseconds."""

    ph: str = ""
    cat: str | None = ""
    name: str | None = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] | None = None


class TraceFile(msgspec.Struct, rename="camel"):
    """What is read of the file."""

    trace_events: list[Event]
    device_properties: list[dict[str, Any]] = []


@dataclass
class Node:
    """A call on a thread. ``kind``: step, module, span or op; ``layer`` is the number of the layer around it,
    -1: none is known. Times in seconds; ``device_s`` is work that it launched itself."""

    kind: str
    name: str
    begin: float
    end: float
    arguments: dict[str, Any]
    layer: int = -1
    children: list[Node] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Kernel:
    """Work on the device, in seconds."""

    name: str
    begin: float
    end: float


@dataclass
class TraceStep:
    """``root`` holds what ran in it. ``phase`` and ``rows`` are None and 0 where the name does not say."""

    root: Node
    phase: Phase | None = None
    rows: int = 0

    def kernels(self) -> list[Kernel]:
        return sorted(_kernels(self.root), key=lambda kernel: kernel.begin)


@dataclass(frozen=True)
class Trace:
    """``device`` is the accelerator's name, empty: the trace is of a CPU."""

    steps: list[TraceStep]
    device: str


def load_trace(path: Path) -> Trace:
    """Raises UsageError for a file that is no trace, or one in which no op ran."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        file = msgspec.json.decode(raw, type=TraceFile)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"cannot read the trace {path}: {why}", param="--trace") from None
    except (msgspec.MsgspecError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(
            f"{path} is no torch profiler trace: {error}",
            hint="give the file that torch.profiler's export_chrome_trace or tensorboard_trace_handler wrote",
            param="--trace",
        ) from None
    events = [event for event in file.trace_events if event.ph == "X" and event.cat and event.name]
    first = min((event.ts for event in events), default=0.0)
    for event in events:  # since the machine started, they have too many digits for sums
        event.ts -= first
    on_device = [event for event in events if event.cat in _DEVICE]
    threads = _threads(events)
    launches = _attach(on_device, threads)
    steps = _steps(threads, bool(on_device))
    steps += _unlaunched(on_device, launches, steps)
    steps = [step for step in steps if step.root.children or step.root.kernels]
    if not steps:
        raise UsageError(f"{path} holds no ops: neither cpu_op nor kernel events", param="--trace")
    names = [str(each["name"]) for each in file.device_properties if each.get("name")]
    return Trace(steps, (names[0] if names else "device") if on_device else "")


@dataclass
class _Thread:
    """A thread's outermost calls, and for each launch's correlation the outermost op around it, else the
    innermost module or step."""

    roots: list[Node] = field(default_factory=list)
    launches: dict[int, Node] = field(default_factory=dict)


def _threads(events: list[Event]) -> list[_Thread]:
    by_thread: defaultdict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
    for event in events:
        if event.cat in ("cpu_op", "user_annotation") or event.cat in _LAUNCHES or _is_module(event):
            by_thread[event.pid, event.tid].append(event)
    return [_thread(members) for members in by_thread.values()]


def _is_module(event: Event) -> bool:
    return event.cat == "python_function" and (event.name or "").startswith(_MODULE)


def _thread(events: list[Event]) -> _Thread:
    """Nests the events by their times, and notes what launches were made within which of them."""
    thread = _Thread()
    opened: list[Node] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        while opened and opened[-1].end <= event.ts / 1e6 + _TICK_S:
            opened.pop()
        if event.cat in _LAUNCHES:
            correlation = (event.args or {}).get("correlation")
            if correlation is not None:
                outermost = next((node for node in opened if node.kind == "op"), None)
                if outermost is not None or opened:
                    thread.launches[correlation] = outermost or opened[-1]
            continue
        node = _node(event, opened[-1].layer if opened else -1)
        (opened[-1].children if opened else thread.roots).append(node)
        opened.append(node)
    return thread


def _node(event: Event, layer: int) -> Node:
    name, kind = event.name or "", "op"
    if _is_module(event):
        kind, name = "module", name.removeprefix(_MODULE)
        instance = _INSTANCE.search(name)
        name = _INSTANCE.sub("", name)
        if instance is not None and _LAYER.search(name):
            layer = int(instance[1])
    elif event.cat == "user_annotation":
        kind = "step" if any(pattern.match(name) for pattern in STEPS) else "span"
    return Node(kind, name, event.ts / 1e6, (event.ts + event.dur) / 1e6, event.args or {}, layer)


def _attach(on_device: list[Event], threads: list[_Thread]) -> set[int]:
    """Hands kernels to the nodes that launched them; returns the correlations that were found."""
    launches: dict[int, Node] = {}
    for thread in threads:
        launches |= thread.launches
    found = set()
    for event in on_device:
        correlation = (event.args or {}).get("correlation", -1)
        node = launches.get(correlation)
        if node is not None:
            node.kernels.append(_kernel(event))
            found.add(correlation)
    return found


def _kernel(event: Event) -> Kernel:
    return Kernel(event.name or "", event.ts / 1e6, (event.ts + event.dur) / 1e6)


def _steps(threads: list[_Thread], has_device: bool) -> list[TraceStep]:
    """The named steps, of the kind that says most; without any, each thread that did work is one step."""
    named = [node for thread in threads for node in _walk(thread.roots) if node.kind == "step"]
    for pattern in STEPS:
        members = [(node, found) for node in named if (found := pattern.match(node.name))]
        if members:
            return [TraceStep(node, *_meaning(found)) for node, found in members]
    steps = []
    for thread in threads:
        roots = [node for node in thread.roots if not has_device or any(_kernels(node))]
        if roots:
            whole = Node("step", "trace", roots[0].begin, max(node.end for node in roots), {}, children=roots)
            steps.append(TraceStep(whole))
    return steps


def _unlaunched(on_device: list[Event], found: set[int], steps: list[TraceStep]) -> list[TraceStep]:
    """Kernels whose launch is not in the trace: they go to the step in whose time they ran, or make one."""
    lost = [_kernel(e) for e in on_device if (e.args or {}).get("correlation", -1) not in found]
    homeless = []
    ordered = sorted(steps, key=lambda step: step.root.begin)
    for kernel in lost:
        home = next((step for step in reversed(ordered) if step.root.begin <= kernel.begin), None)
        if home is None:
            homeless.append(kernel)
        else:
            home.root.kernels.append(kernel)
    if not homeless or ordered:
        return []
    begin, end = min(k.begin for k in homeless), max(k.end for k in homeless)
    return [TraceStep(Node("step", "trace", begin, end, {}, kernels=homeless))]


def _meaning(found: re.Match[str]) -> tuple[Phase | None, int]:
    """Phase and token rows of a step, from its name."""
    groups = found.groupdict()
    if "prompt" in groups:
        prompt, decode = int(groups["prompt"]), int(groups["decode"])
        return "prefill" if prompt else "decode", prompt + decode
    if "prompts" in groups:
        prompt, decode = _query_tokens(groups["prompts"]), _query_tokens(groups["decodes"])
        return "prefill" if prompt else "decode", prompt + decode
    if "mode" in groups:
        decoding = groups["mode"] in ("DECODE", "TARGET_VERIFY", "IDLE")
        return "decode" if decoding else "prefill", int(groups["tokens"] or groups["batch"])
    return None, 0


def _query_tokens(text: str) -> int:
    found = _TOKENS.search(text)
    return int(found[1]) if found is not None else 0


def _walk(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _kernels(node: Node) -> Iterator[Kernel]:
    yield from node.kernels
    for child in node.children:
        yield from _kernels(child)
