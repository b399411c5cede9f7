"""Quantized weights, and how long they are kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe.quantization.grouped_gemm import GroupedGemm, PerExpert
from moe.quantization.quantize import Quantized


class PrimaryLinear(Protocol):
    """A linear whose weight is stored quantized."""

    def matrices(self) -> tuple[Quantized, ...]:
        """Return each expert's weight."""

    def add_gradient(self, grad: Tensor) -> None:
        """Add to the weight's gradient."""


class WeightOperands:
    """The weights of one layer's experts in the form that a backend multiplies.

    They are made when they are asked for. While `keep_quantized_weights` is open they are kept; else not. Weights that
    are stored quantized need no making.
    """

    def __init__(self, primary: Sequence[PrimaryLinear] = ()) -> None:
        self.primary = primary  # by linear, if weights are stored quantized
        self._kept: dict[tuple[int, bool], tuple[tuple[int, int], Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightOperands:
        """Copy without what is kept: the copy's weights are others."""
        return WeightOperands(copy.deepcopy(self.primary, memo))

    def get(self, gemm: GroupedGemm, weight: Tensor, linear: int, *, is_transposed: bool) -> Any:
        """Return what gemm.weight returns, or what is kept of it.

        Raises:
            RuntimeError: the weight was replaced or changed in place since it was kept.
        """
        if self.primary:
            return PerExpert(self.primary[linear].matrices(), is_transposed)
        if self._kept is None:
            return gemm.weight(weight, linear, is_transposed=is_transposed)
        key, version = (linear, is_transposed), _identity(weight)
        if key not in self._kept:
            self._kept[key] = version, gemm.weight(weight, linear, is_transposed=is_transposed)
        kept_version, operand = self._kept[key]
        _check_version(linear, kept_version, version)
        return operand

    def pass_on(self, grad: Tensor | None, linear: int) -> Tensor | None:
        """Return a weight's gradient for autograd; None after it was added to that of a weight stored quantized."""
        if not self.primary or grad is None:
            return grad
        self.primary[linear].add_gradient(grad)
        return None

    def is_first_use(self, weight: Tensor, linear: int) -> bool | None:
        """Return whether a backend that keeps the quantized weight itself must make it now; None: it must not keep it.

        It is made anew where gradients are recorded after they were not, and the other way round: what is made without
        them may lack what backward multiplies.

        Raises:
            RuntimeError: the weight was changed in place since it was kept.
        """
        if self._kept is None:
            return None
        key, now = (linear, False), (_identity(weight), torch.is_grad_enabled())
        version, has_gradients = self._kept.get(key, (now[0], None))
        _check_version(linear, version, now[0])
        self._kept[key] = now
        return has_gradients != now[1]

    def open(self) -> None:
        """Begin to keep."""
        self._kept = {}

    def close(self) -> None:
        """Drop what is kept."""
        self._kept = None


def _identity(weight: Tensor) -> tuple[int, int]:
    """Return what changes when a weight is replaced or changed in place; not when FSDP2 gathers it again."""
    return weight.untyped_storage()._cdata, weight._version


def _check_version(linear: int, kept: tuple[int, int], now: tuple[int, int]) -> None:
    """Raise RuntimeError unless a weight is as it was when it was kept."""
    if kept != now:
        how = "replaced" if kept[0] != now[0] else f"changed in place (version {kept[1]} -> {now[1]})"
        raise RuntimeError(
            f"the weight of linear_fc{linear + 1} was {how} while its quantized form is kept: leave"
            " keep_quantized_weights before optimizer.step(), loading or computing with other weights."
        )


@contextmanager
def keep_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Quantize each expert weight once for all forwards and backwards in this block, which must not change weights.

        with keep_quantized_weights(model):
            for batch in micro_batches:
                model(batch).backward()
        optimizer.step()

    Without it every forward and every backward quantizes the weights anew. What is kept is one byte a value (half a
    byte in FP4) and scales, twice where the two products need other scales. Models without quantized experts are
    unaffected.

    Raises:
        RuntimeError: from a forward or backward in the block, if a weight was replaced or changed in place; for blocks
            that nest. What changes the shards of FSDP2 is not seen.
    """
    found = [
        operands
        for module in model.modules()
        if isinstance(operands := getattr(module, "operands", None), WeightOperands)
    ]
    if any(operands._kept is not None for operands in found):
        raise RuntimeError("keep_quantized_weights is open for this model already; blocks do not nest.")
    for operands in found:
        operands.open()
    try:
        yield
    finally:
        for operands in found:
            operands.close()
