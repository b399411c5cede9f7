"""The activation's input between forward and backward: as it is, in FP8, or not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe.quantization.formats import E4M3
from moe.quantization.quantize import Block, Quantized, quantize

FirstGemm = Literal["keep", "fp8", "recompute"]
STORED_BLOCK = 128  # neighbours in a row that share a scale


@dataclass(frozen=True)
class StoredActivation:
    """The first GEMM's output [M, G, F], plain, quantized, or nothing where it is computed again.

    Attributes:
        shape: [M, G, F]; empty where there is nothing.
        plain: the values, or None.
        quantized: [M, G * F] in E4M3 with a power-of-two scale per 128 neighbours (a whole row where 128 does not
            divide it), or None.
    """

    shape: torch.Size
    plain: Tensor | None = None
    quantized: Quantized | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What must be saved to restore it."""
        if self.quantized is not None:
            return self.quantized.tensors
        return () if self.plain is None else (self.plain,)

    def with_tensors(self, *tensors: Tensor) -> StoredActivation:
        """Return the same with other tensors."""
        if self.quantized is not None:
            return replace(self, quantized=self.quantized.with_tensors(*tensors))
        return replace(self, plain=tensors[0]) if tensors else self

    def without_tensors(self) -> StoredActivation:
        """Return what `with_tensors` is called on."""
        return replace(self, plain=None, quantized=self.quantized and self.quantized.without_tensors())


def store_activation(first: Tensor | None, how: FirstGemm) -> StoredActivation:
    """Return what backward needs of the first GEMM's output [M, G, F], None if that is nothing.

    Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.3 (inputs of SwiGLU are kept in FP8 with scales per 1 x 128).
    """
    if first is None:
        return StoredActivation(torch.Size())
    if how == "keep":
        return StoredActivation(first.shape, plain=first)
    rows = first.flatten(1)
    cols = STORED_BLOCK if rows.shape[1] % STORED_BLOCK == 0 else None
    return StoredActivation(first.shape, quantized=quantize(rows, E4M3, Block(1, cols), "pow2"))


def load_activation(stored: StoredActivation, dtype: torch.dtype) -> Tensor | None:
    """Return the first GEMM's output [M, G, F] in dtype, or None if it was not kept."""
    if stored.quantized is None:
        return stored.plain
    return stored.quantized.dequantize(dtype).view(stored.shape)
