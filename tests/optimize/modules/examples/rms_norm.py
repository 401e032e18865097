"""Normalisation, written out as papers write it."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight


def get_init_inputs() -> list[object]:
    return [768, 1e-5]


def get_inputs() -> list[Tensor]:
    return [torch.randn(64, 768)]
