"""A pack's kernel in a module's place: when it is called, when the module is, and when it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headrace.core.errors import PackError
from headrace.kernels.native.op import NativeKernel
from headrace.optimize.keys import Keys
from headrace.optimize.modules import load
from headrace.optimize.modules.bound import KernelModule
from tests.optimize.modules.support import EXAMPLES, opened, pack_of

MODULE = f"{EXAMPLES}/mlp.py:MLP"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    _, target = opened(MODULE)
    return pack_of(tmp_path_factory.mktemp("pack"), target, keys)


def user_module(seed: int = 1) -> nn.Module:
    """As its user makes it, with weights of their own."""
    kind = type(opened(MODULE)[0].module)
    torch.manual_seed(seed)
    made: nn.Module = kind(320, 896)
    return made.eval()


def same(bound: KernelModule, x: Tensor) -> bool:
    with torch.inference_mode():
        return torch.allclose(bound(x), bound.module(x), atol=1e-4)


def test_the_kernel_computes_the_calls_it_was_judged_on(pack: Path, keys: Keys) -> None:
    bound = load(pack, user_module(), keys=keys)
    x = torch.randn(4, 320)
    assert bound.calls == 0
    assert same(bound, x)
    assert same(bound, x + 1)
    assert bound.calls == 2


def test_every_other_call_is_the_modules(pack: Path, keys: Keys) -> None:
    bound = load(pack, user_module(), keys=keys)
    assert same(bound, torch.randn(5, 320))
    assert same(bound, torch.randn(2, 2, 320))
    assert same(bound, torch.randn(320, 4).t())
    with torch.inference_mode():
        bound(x=torch.randn(4, 320))
    with pytest.raises(RuntimeError):
        bound(torch.randn(4, 320).double())
    assert bound.calls == 0


def test_gradients_and_training_are_the_modules(pack: Path, keys: Keys) -> None:
    bound = load(pack, user_module(), keys=keys)
    bound(torch.randn(4, 320)).sum().backward()
    assert next(bound.parameters()).grad is not None
    bound.train()
    with torch.no_grad():
        bound(torch.randn(4, 320))
    assert bound.calls == 0
    bound.eval()
    with torch.no_grad():
        bound(torch.randn(4, 320))
    assert bound.calls == 1


def test_weights_that_change_are_packed_anew(pack: Path, keys: Keys) -> None:
    bound = load(pack, user_module(), keys=keys)
    x = torch.randn(4, 320)
    assert same(bound, x)
    with torch.no_grad():
        bound.module.get_parameter("down.weight").mul_(3.0)
    assert same(bound, x)
    bound.module.load_state_dict(user_module(seed=2).state_dict())
    assert same(bound, x)
    bound.module.get_submodule("down").weight = nn.Parameter(torch.randn(320, 896))  # type: ignore[assignment]
    assert same(bound, x)
    bound.module.up = nn.Linear(320, 896)
    assert same(bound, x)
    assert bound.calls == 5
    bound.module.double()
    with pytest.raises(RuntimeError):
        bound(x)


def test_it_is_a_module(pack: Path, keys: Keys) -> None:
    bound = load(pack, user_module(), keys=keys)
    whole = nn.Sequential(nn.Identity(), bound)
    with torch.inference_mode():
        whole(torch.randn(4, 320))
    assert bound.calls == 1
    assert {f"1.module.{name}" for name in bound.module.state_dict()} == set(whole.state_dict())


def test_another_module_is_refused(pack: Path, keys: Keys) -> None:
    kind = type(user_module())
    with pytest.raises(PackError, match=r"made for another module: .*was float32 \(896, 320\)"):
        load(pack, kind(320, 128), keys=keys)
    with pytest.raises(PackError, match="made for another module: the module has bias"):
        load(pack, nn.LayerNorm(320), keys=keys)


def test_constants_that_only_the_source_holds_are_checked(tmp_path: Path, keys: Keys) -> None:
    found, target = opened(f"{EXAMPLES}/softmax.py:CappedSoftmax")
    pack = pack_of(tmp_path, target, keys)
    kind = type(found.module)
    assert load(pack, kind(0.7, 30.0), keys=keys).calls == 0
    with pytest.raises(PackError, match="computes something else"):
        load(pack, kind(0.9, 30.0), keys=keys)


def test_a_pack_that_nobody_trusted_signed_is_refused(pack: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="not trusted"):
        load(pack, user_module(), keys=Keys(tmp_path))


def test_a_kernel_that_fails_says_so(pack: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = load(pack, user_module(), keys=keys)
    assert isinstance(bound._kernel, NativeKernel)
    with torch.inference_mode():
        monkeypatch.setattr(bound._kernel, "run", lambda address: 7)
        with pytest.raises(PackError, match="code 7"):
            bound(torch.randn(4, 320))
        monkeypatch.setattr(bound._kernel, "run", lambda address: 1)
        assert bound(torch.randn(4, 320)).shape == (4, 320)
    assert bound.calls == 0


def test_a_fresh_process_loads_it_by_folder_alone(pack: Path, keys: Keys) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
from pathlib import Path
import torch
from headrace.optimize.keys import Keys
from headrace.optimize.modules import load
from mlp import MLP
module = MLP(320, 896).eval()
bound = load({str(pack)!r}, module, keys=Keys(Path({str(keys.folder)!r})))
with torch.inference_mode():
    x = torch.randn(4, 320)
    assert torch.allclose(bound(x), module(x), atol=1e-4)
print("calls", bound.calls)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip() == "calls 1", done.stderr
