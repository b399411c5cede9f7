"""The weights of a rank's experts, and their gradients as they are written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatchers.host_memory import new_tensor
from dispatchers.permutation import sum_dtype
from moe.expert_loop import Chunk


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of L experts.

    Attributes:
        fc1: [L, G, F, H] in the dtype of tokens.
        fc2: [L, H, F].
        fc1_bias: [L, G, F], or None.
        fc2_bias: [L, H], or None.
    """

    fc1: Tensor
    fc2: Tensor
    fc1_bias: Tensor | None = None
    fc2_bias: Tensor | None = None


class WeightSums:
    """The gradients of the weights of all experts, written chunk by chunk.

    Args:
        weights: whose gradients.
        needs: which of fc1, fc2, fc1_bias and fc2_bias need one.
    """

    def __init__(self, weights: ExpertWeights, needs: tuple[bool, ...]) -> None:
        self.fc1 = _new_gradient(weights.fc1) if needs[0] else None  # [L, G, F, H]
        self.fc2 = _new_gradient(weights.fc2) if needs[1] else None  # [L, H, F]
        self.fc1_bias = _new_gradient(weights.fc1_bias) if weights.fc1_bias is not None and needs[2] else None
        self.fc2_bias = _new_gradient(weights.fc2_bias) if weights.fc2_bias is not None and needs[3] else None
        self.fc1_parts = () if self.fc1 is None else self.fc1.flatten(1, 2).unbind(0)  # [G * F, H] each
        self.fc2_parts = () if self.fc2 is None else self.fc2.unbind(0)  # [H, F] each

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of fc1, fc2, fc1_bias, fc2_bias."""
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias

    def write(
        self,
        chunk: Chunk,
        x: Tensor,
        dy: Tensor,
        hidden: Tensor,
        dfirst: Tensor,
        p: Tensor | None,
        dfirst_wide: Tensor | None = None,
    ) -> None:
        """Write those of the chunk's experts, all of whose slots it holds.

        Args:
            chunk: the slots.
            x, dy: [m, H], the rows that the slots read and the gradients of their results, in the dtype of products.
            hidden: [m, F], the second GEMM's input, in the dtype of products.
            dfirst: [m, G * F], the gradient of the first GEMM's output, in the dtype of products.
            p: [m] weights of the slots, or None for 1.
            dfirst_wide: [m, G, F], dfirst in the dtype of sums, for the bias; None: dfirst itself.
        """
        if self.fc2 is not None:
            for expert, left, right in chunk.parts(dy, hidden):
                _matmul(left.t(), right, out=self.fc2_parts[expert])
        if self.fc1 is not None:
            for expert, left, right in chunk.parts(dfirst, x):
                _matmul(left.t(), right, out=self.fc1_parts[expert])
        if self.fc1_bias is not None:
            for expert, part in chunk.parts(dfirst if dfirst_wide is None else dfirst_wide):
                self.fc1_bias[expert] = part.sum(0, dtype=sum_dtype(part.dtype)).view_as(self.fc1_bias[expert])
        if self.fc2_bias is not None and p is None:
            for expert, part in chunk.parts(dy):
                self.fc2_bias[expert] = part.sum(0, dtype=sum_dtype(part.dtype))
        elif self.fc2_bias is not None and p is not None:
            for expert, part, weights in chunk.parts(dy, p):
                self.fc2_bias[expert] = weights @ part.to(weights.dtype)


def _new_gradient(weight: Tensor) -> Tensor:
    """Return memory for the gradient of a weight [L, ...], contiguous: products are written through views of it."""
    return new_tensor(weight.shape, weight.dtype, weight.device)


def _matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to out [m, n], rounding once if out has another dtype: [m, k], [k, n]."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a, b))
