"""The gradients of the experts' weights, computed once for several forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.permutation import reorder_blocks
from moe.expert_loop import Chunk, ExpertLoop, Slots
from moe.expert_weights import ExpertWeights, WeightSums
from router.gating import no_autocast


class DeferredGradients:
    """Computes the gradients of the weights once for several calls of `expert_mlp`, after the backward of all of them.

    So does a dispatch in several parts: the gradients of its rows travel while those of the next part are computed, and
    the weights' gradients are one product per expert, not one per part. Until then each part keeps the second GEMM's
    input [M, F] and the gradient of the first one's output [M, G, F].

    In deterministic mode every expert's rows are brought into the order of source rank and part, which is that of the
    tokens, before they are multiplied, and rows are computed in tiles of one shape: results are bitwise the same for
    any number of parts and of source ranks.

    Args:
        weights: what the experts are.
        tile_rows: rows of a tile, which divides the slots of every expert: deterministic mode. None: whole experts.
    """

    def __init__(self, weights: ExpertWeights, tile_rows: int | None = None) -> None:
        self.tile_rows = tile_rows
        self.num_calls = 0
        self.parts: dict[int, _Part] = {}
        tensors = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
        self.detached = ExpertWeights(*(None if t is None else t.detach() for t in tensors))  # type: ignore[arg-type]
        self.signal: Tensor = _WeightGradients.apply(*tensors, self)  # [], carries no value: backward runs in its order

    def check(self, slots: Slots) -> None:
        """Raise ValueError if the counts do not fit the tiles."""
        if self.tile_rows is not None and any(count % self.tile_rows for count in slots.counts):
            raise ValueError(f"counts ({slots.counts}) must be multiples of the tile ({self.tile_rows} rows).")

    def keep(self, index: int, loop: ExpertLoop, slots: Slots, *tensors: Tensor) -> None:
        """Keep what the gradients of call `index` are made of: tokens, grad, probs, hidden and dfirst; see _Part."""
        loop.forget_scratch()
        self.parts[index] = _Part(loop, slots, *tensors)

    def compute(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of fc1, fc2, fc1_bias and fc2_bias where needed, and forget the parts."""
        parts = [self.parts[index] for index in sorted(self.parts)]
        self.parts = {}
        sums = WeightSums(self.detached, needs)
        for expert in range(self.detached.fc1.shape[0]):
            rows = [part.rows_of(expert) for part in parts]
            joined = [torch.cat(pieces) if len(parts) > 1 else pieces[0] for pieces in zip(*rows, strict=True)]
            if self.tile_rows is not None and len(parts) > 1:
                order = self._order(parts, expert)
                joined = [piece.index_select(0, order) for piece in joined]
            x, dy, hidden, dfirst, p = joined
            sums.write(Chunk(slice(0, len(x)), range(expert, expert + 1), (len(x),)), x, dy, hidden, dfirst, p)
        return sums.gradients

    @staticmethod
    def _order(parts: list[_Part], expert: int) -> Tensor:
        """Return the places of an expert's slots, which lie by part and source, in the order of source and part."""
        sizes = torch.stack([part.slots.per_source[expert] for part in parts])  # type: ignore[index]  # [parts, sources]
        blocks = torch.arange(sizes.numel(), device=sizes.device).view(sizes.shape)
        num_rows = sum(part.count_of(expert) for part in parts)
        return reorder_blocks(sizes.reshape(-1), blocks.t().reshape(-1), num_rows)


@dataclass(frozen=True)
class _Part:
    """What one call of `expert_mlp` leaves for the weights' gradients: tokens and grad [R, H], the rest by slot."""

    loop: ExpertLoop
    slots: Slots
    tokens: Tensor
    grad: Tensor
    probs: Tensor
    hidden: Tensor
    dfirst: Tensor

    def count_of(self, expert: int) -> int:
        """Slots of an expert: real ones where they are known, else with padding, whose rows are zeros."""
        return (self.slots.real_counts or self.slots.counts)[expert]

    def rows_of(self, expert: int) -> tuple[Tensor, ...]:
        """Return x, dy [m, H], hidden [m, F], dfirst [m, G * F] and probs [m] of an expert's slots."""
        start = sum(self.slots.counts[:expert])
        part = slice(start, start + self.count_of(expert))
        x, dy = (self.loop.gather_new(source, part) for source in (self.tokens, self.grad))
        return x, dy, self.hidden[part], self.dfirst[part], self.probs[part]


class _WeightGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fc1: Tensor, fc2: Tensor, fc1_bias: Tensor | None, fc2_bias: Tensor | None, deferred: Any
    ) -> Tensor:
        ctx.deferred = deferred
        return fc1.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return *ctx.deferred.compute(ctx.needs_input_grad[:4]), None
