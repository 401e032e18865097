"""A torch profiler trace as a GPU server leaves it, made by hand: two layers, two decodes and a prefill."""

from __future__ import annotations

from typing import Any

STEP_US = 1000
LAYER_US = 300
PRODUCT_US = 100
ATTENTION_US = 40
GRAPH_US = 25


def synthetic_trace(names: tuple[str, str, str]) -> dict[str, Any]:
    """Three steps of these names. In each: two layers with a product of 64 x 128 and an attention, whose
    kernels run 150 µs after their launches; and one kernel from a graph. Then the device idles."""
    events: list[dict[str, Any]] = []
    correlation = 0

    def add(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        on_device = cat in ("kernel", "gpu_memcpy")
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0 if on_device else 77,
                "tid": 7 if on_device else 78,
                "ts": 5_141_838_260_893.045 + ts,
                "dur": dur,
                "args": args,
            }
        )

    def launch(name: str, ts: float, dur: float, runtime: str = "cudaLaunchKernel") -> None:
        nonlocal correlation
        correlation += 1
        add("cuda_runtime", runtime, ts, 5, correlation=correlation)
        add("kernel", name, ts + 150, dur, correlation=correlation, stream=7)

    for index, name in enumerate(names):
        begin = index * STEP_US
        rows = 1 if index else 32
        add("user_annotation", name, begin, 700)
        add("python_function", "nn.Module: ToyForCausalLM_0", begin + 10, 640)
        for layer in range(2):
            at = begin + 20 + layer * LAYER_US
            add("python_function", f"nn.Module: ToyDecoderLayer_{layer}", at, 280)
            add(
                "cpu_op",
                "aten::linear",
                at + 10,
                100,
                **{"Input Dims": [[rows, 64], [128, 64], []], "Input type": ["c10::BFloat16"] * 2 + [""]},
            )
            add(
                "cpu_op",
                "aten::mm",
                at + 20,
                80,
                **{"Input Dims": [[rows, 64], [64, 128]], "Input type": ["c10::BFloat16"] * 2},
            )
            launch("void cutlass::gemm<float, 3>(Params)", at + 30, PRODUCT_US)
            add("cpu_op", "toy::unified_attention", at + 150, 100)
            launch("flash_fwd_kernel", at + 200, ATTENTION_US)
        launch("void fused_sample<float>(int)", begin + 630, GRAPH_US, "cudaGraphLaunch")
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Toy GPU", "totalGlobalMem": 1}],
        "traceEvents": [{"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}}, *events],
    }
