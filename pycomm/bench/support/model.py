"""A small character-level transformer: pre-norm and causal.

Half of the input channels of each layer come from the previous character. So the model need not
learn to attend one character back, and writes words after a few hundred steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give 0.8 M parameters."""

    alphabet: int = 96
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 4


def shifted(x: torch.Tensor) -> torch.Tensor:
    """`x` [batch, time, width] with half of its channels delayed by one step; zeros first."""
    now, before = x.chunk(2, dim=2)
    return torch.cat([now, F.pad(before[:, :-1], (0, 0, 1, 0))], dim=2)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its input [batch, time, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.query_key_value(shifted(self.before_attention(x)))
        q, k, v = qkv.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(batch, time, width))
        y: torch.Tensor = self.contract(F.gelu(self.expand(shifted(self.before_perceptron(x)))))
        return x + y


class CharGPT(nn.Module):
    """Maps tokens, int64 [batch, time], to scores of the next one, [batch, time, alphabet]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.characters = nn.Embedding(shape.alphabet, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.alphabet, bias=False)
        for name, weight in self.named_parameters():
            _start(name, weight, shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        y: torch.Tensor = self.scores(self.norm(self.blocks(x)))
        return y

    @torch.no_grad()
    def write(self, start: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
        """`start` (int64 [n], n > 0) and `count` sampled characters, at temperature 0.8."""
        tokens = start
        for _ in range(count):
            scores = self(tokens[None, -self.shape.context :])[0, -1]
            drawn = torch.multinomial(F.softmax(scores / 0.8, dim=0), 1, generator=random)
            tokens = torch.cat([tokens, drawn])
        return tokens


def _start(name: str, weight: torch.Tensor, shape: Shape) -> None:
    """Initializes a weight; nn.LayerNorm keeps its own values."""
    if "norm" in name or "before" in name:
        return
    if name.endswith("bias"):
        nn.init.zeros_(weight)
    elif name.startswith(("characters", "places")):
        nn.init.normal_(weight, std=0.3)  # large, so that plain SGD progresses from the start
    else:
        adds_to_stream = name.endswith(("gather.weight", "contract.weight"))
        nn.init.normal_(weight, std=0.06 / (2 * shape.layers) ** (0.5 if adds_to_stream else 0))
