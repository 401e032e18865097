"""A user's file in its own process: what is found out about it, and what is said when it is no good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.core.errors import HeadraceError, StartupError, UnsupportedModelError, UsageError
from headrace.optimize.modules.host import ModuleHost
from headrace.optimize.modules.source import absolute, is_module
from tests.optimize.modules.support import EXAMPLES, write_module

GOOD = """
class Model(nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.randn(4, 8)]
"""


def test_what_a_call_holds_and_does() -> None:
    with ModuleHost(f"{EXAMPLES / 'mlp.py'}:MLP") as host:
        call = host.describe()
        weights, inputs = host.state(), host.inputs(3)
        wide, own = (host.run({**weights, **inputs}, wide=wide)["out"] for wide in (True, False))
        assert host.time() > 0
    assert [slot.name for slot in call.slots if slot.role == "input"] == ["x"]
    assert {slot.source for slot in call.slots if slot.role == "weight"} >= {"norm.weight", "down.weight"}
    assert [node.op.split(".")[1] for node in call.graph] == [
        *("layer_norm", "linear", "silu", "linear", "mul", "linear", "add")
    ]
    assert call.arguments == ["x"]
    assert call.contents[0] == "given"
    assert {"normal", "heavy"} <= set(call.contents)
    assert wide.dtype is torch.float64
    assert torch.allclose(wide.float(), own, atol=1e-4)
    assert not torch.equal(inputs["x"], torch.zeros_like(inputs["x"]))


def test_inputs_follow_their_seed_and_weights_those_that_are_given(tmp_path: Path) -> None:
    name = write_module(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, factor):
                super().__init__()
                self.factor = nn.Parameter(torch.tensor(factor))

            def forward(self, x, count):
                return x * self.factor * count

        def get_init_inputs():
            return [2.0]

        def get_inputs():
            return [torch.randn(4, 8), 3]
        """,
    )
    with ModuleHost(name) as host:
        call = host.describe()
        first, same, other = (host.inputs(seed)["x"] for seed in (1, 1, 2))
        found = host.run({"x": first, "factor": torch.tensor(5.0)}, wide=False)["out"]
    assert call.arguments == ["x", [3]]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.allclose(found, first * 15)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (GOOD.replace("Model", "Other"), UsageError, "no torch.nn.Module called Model"),
        (GOOD.replace("get_inputs", "inputs"), UsageError, "no function get_inputs"),
        (GOOD.replace("[torch.randn(4, 8)]", "torch.randn(4, 8)"), UsageError, "gives a Tensor"),
        (GOOD + "\nraise ValueError('at import')", UsageError, "at import"),
        (GOOD + "\ndef get_init_inputs():\n    return [1, 2]", UnsupportedModelError, "cannot be made"),
        (GOOD.replace("4, 8", "4, 8, dtype=torch.complex64"), UnsupportedModelError, "complex64"),
        (GOOD.replace("4, 8", "4, 8, dtype=torch.float64"), UnsupportedModelError, "float64"),
        (GOOD.replace("[torch.randn(4, 8)]", "['words']"), UnsupportedModelError, "is a str"),
        (GOOD.replace("x + 1", "x + torch.randn(4, 8)"), UnsupportedModelError, "different results"),
        (GOOD.replace("x + 1", "x.add_(1) * 1"), UnsupportedModelError, "the module changes x"),
        (GOOD.replace("x + 1", "{'x': x}"), UnsupportedModelError, "gives a dict"),
        (GOOD.replace("x + 1", "x.log()"), UnsupportedModelError, "not finite"),
        (GOOD.replace("x + 1", "x @ torch.ones(3, 3)"), UnsupportedModelError, "it fails"),
        (GOOD + "\nimport os\nos._exit(3)", StartupError, "its process ended"),
    ],
)
def test_a_file_that_is_no_good_is_named(
    tmp_path: Path, text: str, kind: type[HeadraceError], words: str
) -> None:
    with ModuleHost(write_module(tmp_path, text)) as host, pytest.raises(kind, match=words) as caught:
        host.describe()
    assert "user.py" in caught.value.message


def test_a_file_that_never_ends_is_given_up(tmp_path: Path) -> None:
    name = write_module(tmp_path, "import time\ntime.sleep(600)")
    with ModuleHost(name, timeout_s=3.0) as host, pytest.raises(StartupError, match="no answer"):
        host.describe()


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    with (
        ModuleHost(write_module(tmp_path, GOOD), digest="0" * 64) as host,
        pytest.raises(UsageError, match="changed"),
    ):
        host.describe()


def test_names() -> None:
    assert is_module("a/b.py:Model")
    assert not is_module("smollm2-135m")
    assert not is_module("b.py")
    with pytest.raises(UsageError, match="no file"):
        absolute("missing.py:Model")
    assert absolute(f"{EXAMPLES / 'mlp.py'}:MLP").endswith("mlp.py:MLP")


def test_a_module_that_cannot_be_traced_is_still_described(tmp_path: Path) -> None:
    text = (
        GOOD.replace("x + 1", "x + torch.arange(8, dtype=x.dtype)[:8]")
        .replace("class Model", "CONSTANT = torch.ones(8)\nclass Model")
        .replace("x + torch", "x * CONSTANT + torch")
    )
    with ModuleHost(write_module(tmp_path, text)) as host:
        call = host.describe()
    assert call.graph == []
    assert [slot.role for slot in call.slots] == ["input", "output"]
