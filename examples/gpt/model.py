"""A small GPT: the usual decoder, byte tokens, output weights tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - everybody calls it F
from torch import Tensor, nn

VOCABULARY = 256  # one token a byte


@dataclass(frozen=True)
class Shape:
    """How large the model is."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """Attention, then a two-layer network, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Byte tokens in, scores of the next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean surprise about each next token, in nats."""
        scores = self(tokens[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
