"""A fused MLP: norm, gated pair, down projection, residual, on a few rows."""

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.gate = nn.Linear(hidden_size, intermediate_size)
        self.up = nn.Linear(hidden_size, intermediate_size)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def get_init_inputs() -> list[object]:
    return [320, 896]


def get_inputs() -> list[Tensor]:
    return [torch.randn(4, 320)]
