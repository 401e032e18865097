"""The search's templates on modules of many kinds, against the module in float64, in this process."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from headrace.optimize.judge.compare import error, limit
from headrace.optimize.loop import write_candidate
from headrace.optimize.modules.bound import bind, find
from headrace.optimize.modules.trace import run, run_wide, widened
from headrace.optimize.proposal import Trial
from headrace.optimize.proposers.module_search import ModuleSearch, fit_of
from headrace.optimize.records import Candidate, Measurement, Ratio, Verdict
from tests.optimize.modules.support import EXAMPLES, FIVE, opened, write_module

ROWS = "\ndef get_inputs():\n    return [torch.randn(3, 5, 33)]\n"
IMAGES = "\ndef get_inputs():\n    return [torch.randn(2, 8, 13, 17)]\n"
HEADS = """
def get_inputs():
    return [torch.randn(2, 3, 37, 20), torch.randn(2, 3, 37, 20), torch.randn(2, 3, 37, 27)]
"""

MODULES = {
    "norms, activations, two outputs": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(33), nn.RMSNorm(33, eps=1e-6)
        self.factor = nn.Parameter(torch.rand(1))
        self.up, self.down = nn.Linear(33, 70), nn.Linear(70, 33)

    def forward(self, x):
        y = self.down(F.gelu(self.up(self.first(x))))
        z = self.second(F.leaky_relu(y) + x * self.factor)
        return z, torch.log_softmax(z / 0.3, -1)
""",
    "products one after the other, one number a row": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(33, 50), nn.Linear(50, 17, bias=False), nn.Linear(17, 40)

    def forward(self, x):
        return self.c(torch.softmax(self.b(F.relu(self.a(x))), dim=-1)).sum(-1, keepdim=True)
""",
    "moments written out": """
class Model(nn.Module):
    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return F.hardswish((x - mean) / torch.sqrt(variance + 1e-3)).clamp(-1, 2) * torch.amin(x, -1, True)
""",
    "one product": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(33, 64)

    def forward(self, x):
        return self.a(x)
""",
    "elementwise": """
class Model(nn.Module):
    def forward(self, x):
        y = torch.sigmoid(x) * F.gelu(x, approximate="tanh")
        return F.softplus(F.elu(torch.tanh(x))) + x.abs().sqrt() - y
""",
    "a sum that drops its dimension": """
class Model(nn.Module):
    def forward(self, x):
        return torch.sum(x * x, dim=2)
""",
    "bfloat16": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(33, 70), nn.Linear(70, 33), nn.RMSNorm(33, eps=1e-6)
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.norm(self.down(F.silu(self.up(x))) + x)

def get_inputs():
    return [torch.randn(9, 33).bfloat16()]
""",
    "strides, dilation, groups": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 12, (3, 5), stride=(2, 3), padding=(1, 0), dilation=(2, 1), groups=4)

    def forward(self, x):
        return F.hardswish(self.conv(x) + 1.0)
"""
    + IMAGES,
    "by channel, in place": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x))) * 2
"""
    + IMAGES,
    "causal attention": """
class Model(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
    + HEADS,
    "attention with a scale of its own": """
class Model(nn.Module):
    def forward(self, q, k, v):
        return F.softmax(torch.matmul(q * 0.3, k.transpose(2, 3)), -1) @ v
"""
    + HEADS,
}


def check(name: str, folder: Path, candidates: int) -> None:
    """The first ``candidates`` of a search whose first is always the best."""
    found, target = opened(name)
    arguments = found.inputs(5)
    truth, stock = run_wide(widened(found.module), arguments), run(found.module, arguments)
    search, rng = ModuleSearch(2), random.Random(1)
    history: list[Trial] = []
    for number in range(candidates):
        source = search.propose(target, history[0] if history else None, history, rng)
        assert source is not None
        place = folder / str(number)
        digest = write_candidate(place, source, target)
        bound = bind(find(place), found.module).eval()
        answer = run(bound, arguments)
        assert bound.calls == 1
        for own, right, theirs in zip(answer, truth, stock, strict=True):
            assert error(own, right) <= limit(error(theirs, right), own.dtype), source.parameters
        history.append(trial(str(number), digest, place, source.parameters, 2.0 - number))


def trial(name: str, digest: str, folder: Path, parameters: dict[str, str], speed: float) -> Trial:
    ratio = Ratio(median=speed, low=speed, high=speed, pairs=9, baseline_s=1.0, candidate_s=1.0)
    verdict = Verdict(
        candidate=name, digest=digest, passed=True, reason="ok", detail="", seconds=0.0, sandbox=""
    )
    measurement = Measurement(
        candidate=name, digest=digest, alone={"a": ratio}, end_to_end={}, agreement="", won=True, detail=""
    )
    candidate = Candidate(name=name, folder=name, digest=digest, author="search", parameters=parameters)
    return Trial(candidate, folder, verdict, measurement)


@pytest.mark.parametrize("name", FIVE)
def test_the_five_examples(name: str, tmp_path: Path) -> None:
    check(f"{EXAMPLES}/{name}", tmp_path, 4)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_of_many_kinds(kind: str, tmp_path: Path) -> None:
    text = MODULES[kind]
    check(write_module(tmp_path, text if "get_inputs" in text else text + ROWS), tmp_path, 2)


@pytest.mark.parametrize(
    "forward",
    [
        "x.sort(-1)[0]",  # an operator without template
        "x.mean(1, keepdim=True) + x",  # across rows
        "x.transpose(1, 2).contiguous()",
        "x @ x.transpose(1, 2)",
        "F.layer_norm(x, (5, 33))",
        "torch.softmax(x, 1)",
        "x.view(5, 3, 33)",
        "x + torch.arange(33, dtype=x.dtype)",  # a constant that is no slot
        "torch.cumsum(x, -1)",
    ],
)
def test_what_no_template_computes_is_left_to_others(forward: str, tmp_path: Path) -> None:
    text = f"class Model(nn.Module):\n    def forward(self, x):\n        return {forward}\n"
    _, target = opened(write_module(tmp_path, text + ROWS))
    assert fit_of(target) is None
    assert ModuleSearch(2).propose(target, None, [], random.Random(0)) is None


def test_a_search_ends_and_proposes_nothing_twice() -> None:
    _, target = opened(f"{EXAMPLES}/rms_norm.py:RMSNorm")
    search, history, seen = ModuleSearch(2), list[Trial](), set[str]()
    for number in itertools.count():
        source = search.propose(target, None, history, random.Random(number))
        if source is None:
            break
        text = f"{source.files}{source.entry}"
        assert text not in seen
        seen.add(text)
        history.append(trial(str(number), text, Path(), source.parameters, 1.0 / (1 + number)))
    assert 8 <= len(history) < 60
