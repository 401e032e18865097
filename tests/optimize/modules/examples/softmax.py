"""Softmax with a temperature and a soft cap on the scores, as samplers and routers have it."""

import torch
from torch import Tensor, nn


class CappedSoftmax(nn.Module):
    def __init__(self, temperature: float, cap: float) -> None:
        super().__init__()
        self.temperature, self.cap = temperature, cap

    def forward(self, scores: Tensor) -> Tensor:
        capped = self.cap * torch.tanh(scores / self.cap)
        return torch.softmax(capped / self.temperature, dim=-1)


def get_init_inputs() -> list[object]:
    return [0.7, 30.0]


def get_inputs() -> list[Tensor]:
    return [torch.randn(48, 1000)]
