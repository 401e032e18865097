"""Convolution, batch norm and activation: the stem of a small image model."""

import torch
from torch import Tensor, nn


class Stem(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.norm(self.conv(x)))


def get_init_inputs() -> list[object]:
    return [12, 24]


def get_inputs() -> list[Tensor]:
    return [torch.randn(2, 12, 28, 28)]
