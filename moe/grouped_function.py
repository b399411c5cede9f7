"""The expert computation over the slots of all experts at once, with the products of a GroupedGemm.

Saved for backward: the first GEMM's output (or its FP8 form), indices, probs, and of the rows whichever is smaller:
the dispatched rows [R, H] as they are, or the M slots quantized by columns, as the weight gradient will read them. The
results are the same bit by bit; the activation and the second GEMM's input are computed again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dispatchers.host_memory import new_tensor
from dispatchers.permutation import sum_dtype
from moe.activations import Activation
from moe.expert_loop import Slots, add_per_expert, dot_per_expert, sum_per_expert
from moe.expert_weights import ExpertWeights
from moe.parallel import gradient_dtype
from moe.quantization.grouped_gemm import FC1, FC2, GroupedGemm
from moe.quantization.stored import FirstGemm, load_activation, store_activation
from moe.quantization.weights import WeightOperands
from router.gating import no_autocast


def grouped_expert_mlp(
    tokens: Tensor,
    probs: Tensor,
    slots: Slots,
    activation: Activation,
    weights: ExpertWeights,
    gemm: GroupedGemm,
    operands: WeightOperands,
    *,
    first_gemm: FirstGemm = "keep",
) -> Tensor:
    """Return for each row the sum over its slots of fc2(prob * activation(fc1(row))) + prob * fc2_bias.

    Args:
        tokens: [R, H].
        probs: [M] fp32 or fp64.
        slots: which rows each expert reads; slots whose prob is 0 must be padding.
        activation: the activation, which says whether G is 1 or 2.
        weights: what the experts are.
        gemm: the backend, for these counts.
        operands: the weights in the form that gemm multiplies.
        first_gemm: what happens to the first GEMM's output until backward: see `expert_mlp`.

    Returns:
        [R, H] in the dtype of tokens; rows that no slot reads are 0.
    """
    with no_autocast(tokens.device):
        return _GroupedExpertMLP.apply(
            tokens,
            probs,
            weights.fc1,
            weights.fc2,
            weights.fc1_bias,
            weights.fc2_bias,
            slots,
            activation,
            gemm,
            operands,
            first_gemm,
        )


class _GroupedExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        probs: Tensor,
        fc1_weight: Tensor,
        fc2_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_bias: Tensor | None,
        slots: Slots,
        activation: Activation,
        gemm: GroupedGemm,
        operands: WeightOperands,
        first_gemm: FirstGemm,
    ) -> Tensor:
        rows = Rows(slots, tokens.shape[0])
        x = rows.gather(tokens)  # [R, H] -> [M, H]
        keeps = gemm.saved_bits is not None and x.numel() * gemm.saved_bits < tokens.numel() * tokens.itemsize * 8
        keeps = keeps and first_gemm != "recompute"  # which reads the rows again
        by_rows, kept_columns = gemm.both(x, FC1, "input") if keeps else (gemm.by_rows(x, FC1, "input"), None)
        first = _first_product(gemm, by_rows, operands, fc1_weight, fc1_bias, slots.counts, tokens.dtype)  # [M, G, F]
        hidden = weigh_activation(activation, first, probs, tokens.dtype)  # [M, F]
        fc2 = operands.get(gemm, fc2_weight, FC2, is_transposed=False)
        y = gemm.multiply(gemm.by_rows(hidden, FC2, "input"), fc2).to(sum_dtype(tokens.dtype))  # [M, H]
        if fc2_bias is not None:
            add_per_expert(y, fc2_bias, slots.counts, probs)
        out = rows.add(y)  # [M, H] -> [R, H]
        stored = store_activation(None if first_gemm == "recompute" else first, first_gemm)
        x_tensors = (tokens,) if kept_columns is None else kept_columns.tensors
        ctx.save_for_backward(
            slots.row_ids, probs, fc1_weight, fc2_weight, fc1_bias, fc2_bias, *stored.tensors, *x_tensors
        )
        ctx.num_stored, ctx.stored = len(stored.tensors), stored.without_tensors()
        ctx.kept_columns = None if kept_columns is None else kept_columns.without_tensors()
        ctx.slots, ctx.num_rows, ctx.dtype = replace(slots, row_ids=None), tokens.shape[0], tokens.dtype
        ctx.activation, ctx.gemm, ctx.operands = activation, gemm, operands
        return out.to(tokens.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(grad.device):
            return _GroupedExpertMLP.differentiate(ctx, grad)

    @staticmethod
    def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of forward."""
        row_ids, probs, fc1_weight, fc2_weight, fc1_bias, fc2_bias, *saved = ctx.saved_tensors
        stored, x_tensors = saved[: ctx.num_stored], saved[ctx.num_stored :]
        slots, gemm, needs = replace(ctx.slots, row_ids=row_ids), ctx.gemm, ctx.needs_input_grad
        rows = Rows(slots, ctx.num_rows)
        dy = rows.gather(grad.to(ctx.dtype))  # [R, H] -> [M, H]
        dy_rows, dy_columns = gemm.both(dy, FC2, "gradient")
        fc2 = ctx.operands.get(gemm, fc2_weight, FC2, is_transposed=True)
        dh = gemm.multiply(dy_rows, fc2).to(sum_dtype(ctx.dtype))  # [M, F]
        first = load_activation(ctx.stored.with_tensors(*stored), ctx.dtype)  # [M, G, F]
        if first is None:
            by_rows = gemm.by_rows(rows.gather(x_tensors[0]), FC1, "input")
            first = _first_product(gemm, by_rows, ctx.operands, fc1_weight, fc1_bias, slots.counts, ctx.dtype)
        first = first.to(sum_dtype(ctx.dtype))
        dfirst = new_tensor(first.shape, first.dtype, first.device)
        weights = probs.to(first.dtype)
        hidden = new_tensor(dh.shape, dh.dtype, dh.device)  # [M, F]
        _, dp = ctx.activation.forward_backward(first, dh, weights, dfirst, hidden)  # [M]
        grads = _empty_gradients((fc1_weight, fc2_weight, fc1_bias, fc2_bias), needs[2:6])
        if grads[1] is not None:
            gemm.weight_gradient(dy_columns, gemm.by_columns(hidden.to(ctx.dtype), FC2, "input"), grads[1])
        if grads[2] is not None:
            sum_per_expert(dfirst, slots.counts, grads[2])
        if grads[3] is not None:
            sum_per_expert(dy.to(first.dtype) * weights.unsqueeze(-1), slots.counts, grads[3])
        if fc2_bias is not None and dp is not None:
            dp = dp + dot_per_expert(dy.to(first.dtype), fc2_bias, slots.counts)
        dfirst_rows, dfirst_columns = gemm.both(dfirst.flatten(1).to(ctx.dtype), FC1, "gradient")  # [M, G * F]
        if grads[0] is not None:
            if ctx.kept_columns is None:
                x_columns = gemm.by_columns(rows.gather(x_tensors[0]), FC1, "input")
            else:
                x_columns = ctx.kept_columns.with_tensors(*x_tensors)
            gemm.weight_gradient(dfirst_columns, x_columns, grads[0].flatten(1, 2))
        fc1 = ctx.operands.get(gemm, fc1_weight.flatten(1, 2), FC1, is_transposed=True)
        dx = gemm.multiply(dfirst_rows, fc1)  # [M, H]
        for linear in (FC1, FC2):
            grads[linear] = ctx.operands.pass_on(grads[linear], linear)
        grad_tokens = rows.add(dx.to(sum_dtype(ctx.dtype))).to(ctx.dtype)  # [R, H]
        return grad_tokens, None if dp is None else dp.to(probs.dtype), *grads, None, None, None, None, None


class Rows:
    """Reads the row of every slot, and adds results up by row."""

    def __init__(self, slots: Slots, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_padding: Tensor | None = None  # [M, 1] bool
        self.padding_ids, self.real_ids = None, None  # which slots; on a CPU alone, elsewhere counting them waits
        self.read_ids = slots.row_ids  # [M]
        if slots.has_padding and slots.row_ids is not None:
            is_padding = slots.row_ids < 0
            self.is_padding = is_padding.unsqueeze(-1)
            self.read_ids = slots.row_ids.clamp(min=0)
            if is_padding.device.type == "cpu":
                self.padding_ids, self.real_ids = (mask.nonzero().squeeze(1) for mask in (is_padding, ~is_padding))

    def gather(self, source: Tensor) -> Tensor:
        """[R, H] -> [M, H], zeros for padding."""
        if self.read_ids is None:
            return source
        if self.num_rows == 0:
            return source.new_zeros(self.read_ids.shape[0], source.shape[1])
        rows = _select(source, self.read_ids)
        if self.padding_ids is not None:
            return rows.index_fill_(0, self.padding_ids, 0)
        return rows if self.is_padding is None else rows.masked_fill_(self.is_padding, 0)

    def add(self, results: Tensor) -> Tensor:
        """[M, H] -> [R, H], the sum over each row's slots; results of padding are dropped."""
        if self.read_ids is None:
            return results
        sums = new_tensor((self.num_rows, results.shape[1]), results.dtype, results.device).zero_()
        if self.num_rows == 0:
            return sums
        if self.real_ids is not None:
            return sums.index_add_(0, self.read_ids[self.real_ids], _select(results, self.real_ids))
        if self.is_padding is not None:
            results = results.masked_fill(self.is_padding, 0)
        return sums.index_add_(0, self.read_ids, results)


def _select(source: Tensor, ids: Tensor) -> Tensor:
    """Return rows of source [R, H]: [M] -> [M, H]."""
    rows = new_tensor((ids.shape[0], source.shape[1]), source.dtype, source.device)
    return torch.index_select(source, 0, ids, out=rows)


def weigh_activation(activation: Activation, first: Tensor, probs: Tensor, dtype: torch.dtype) -> Tensor:
    """The second GEMM's input: first [M, G, F], probs [M] -> [M, F]."""
    wide = sum_dtype(dtype)
    out = new_tensor((first.shape[0], first.shape[2]), wide, first.device)
    return activation.forward(first.to(wide), out).mul_(probs.to(wide).unsqueeze(-1)).to(dtype)


def _first_product(
    gemm: GroupedGemm,
    rows: Any,
    operands: WeightOperands,
    weight: Tensor,
    bias: Tensor | None,
    counts: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Return the first GEMM's output [M, G, F] in dtype for rows in the form that gemm multiplies."""
    first = gemm.multiply(rows, operands.get(gemm, weight.flatten(1, 2), FC1, is_transposed=False))
    first = first.to(dtype).view(-1, *weight.shape[1:3])
    if bias is not None:
        add_per_expert(first, bias, counts)
    return first


def _empty_gradients(parameters: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """Return memory for the gradients that are needed, contiguous."""
    return [
        new_tensor(p.shape, gradient_dtype(p), p.device) if p is not None and need else None
        for p, need in zip(parameters, needs, strict=True)
    ]
