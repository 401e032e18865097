"""From a pack to a module that runs its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from headrace.core.errors import PackError
from headrace.kernels.native.pack import check_conditions
from headrace.optimize.judge import contents
from headrace.optimize.judge.compare import error, limit
from headrace.optimize.keys import Keys
from headrace.optimize.modules.bound import Found, KernelModule, bind, find, mismatch
from headrace.optimize.modules.source import FLOATS, Argument
from headrace.optimize.modules.trace import rows_of, run, run_wide, widened
from headrace.optimize.packing import verify_pack
from headrace.optimize.records import ModuleCall


def load(
    folder: str | Path,
    module: nn.Module,
    *,
    keys: Keys | None = None,
    inputs: Sequence[Argument] | None = None,
) -> KernelModule:
    """``module`` with the kernel of the pack in ``folder``: its forward calls the kernel where it was judged
    (shapes and dtypes of get_inputs(), contiguous, no gradients wanted, evaluation mode), else ``module``.

    The pack's signature, files and evidence are checked against ``keys`` (default: this user's), the
    module's weights against those of the judged one, and the kernel's answer on ``inputs`` (default: random
    ones, where the module takes any) against the module in float64. Raises PackError with what does not hold;
    its children for a source that does not compile and for a machine without compiler.
    """
    folder = Path(folder)
    manifest = verify_pack(folder, keys)
    dims = dict(manifest.conditions.shapes)  # those of a served model; a module's are its slots
    check_conditions(manifest.conditions, dtype=manifest.conditions.dtype, dims=dims)
    found = find(folder)
    differs = mismatch(module, found.call)
    if differs:
        raise PackError(f"{folder.name}: the kernel was made for another module: {differs}")
    bound = bind(found, module)
    _check(found, bound, inputs)
    return bound


def _check(found: Found, bound: KernelModule, given: Sequence[Argument] | None) -> None:
    """Constants of the module (an epsilon, a number of heads) are in the kernel's source alone."""
    arguments = list(given) if given is not None else _drawn(found.call)
    if arguments is None:
        return
    was_training, calls = bound.training, bound.calls
    bound.eval()
    try:
        with torch.inference_mode():
            truth = run_wide(widened(bound.module), arguments)
            stock = run(bound.module, arguments)
            answer = run(bound, arguments)
    finally:
        bound.train(was_training)
    if bound.calls == calls:
        raise PackError(
            "the kernel declines the inputs that it is checked with", hint="load(…, inputs=get_inputs())"
        )
    for place, (own, right) in enumerate(zip(answer, truth, strict=True)):
        off, allowed = error(own, right), limit(error(stock[place], right), own.dtype)
        if off > allowed:
            raise PackError(
                f"the kernel computes something else than this module: output {place} is off by {off:.2g} "
                f"of its row's size, allowed is {allowed:.2g}",
                hint="was the module made with the arguments of get_init_inputs()?",
            )
    bound.calls = calls


def _drawn(call: ModuleCall) -> list[Argument] | None:
    """Random arguments; None where a number or an index could not be just anything."""
    slots = {slot.name: slot for slot in call.slots if slot.role == "input"}
    if "normal" not in call.contents or any(slot.dtype not in FLOATS for slot in slots.values()):
        return None
    arguments: list[Argument] = []
    for place, each in enumerate(call.arguments):
        if not isinstance(each, str):
            arguments.append(each[0])
            continue
        tensor: Tensor = torch.empty(slots[each].shape, dtype=getattr(torch, slots[each].dtype))
        contents.fill_activation(rows_of(tensor), "normal", 1 + place)
        arguments.append(tensor)
    return arguments
