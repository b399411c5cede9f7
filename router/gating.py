"""Router logits: one matrix product in fp32 or fp64, whatever the dtype of tokens and weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves the dtype of products on the device as it is."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _RouterGatingLinear(torch.autograd.Function):
    """Casts, multiplies, and saves the tokens and weights as they came, not their casts."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        with no_autocast(inp.device):
            logits = inp.to(router_dtype) @ weight.to(router_dtype).t()  # [T, H] -> [T, E]
        return logits if bias is None else logits.add_(bias.to(router_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inp, weight = ctx.saved_tensors
        needs_inp, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with no_autocast(grad.device):
            grad_inp = (grad @ weight.to(grad.dtype)).to(inp.dtype) if needs_inp else None  # [T, E] -> [T, H]
            grad_weight = (grad.t() @ inp.to(grad.dtype)).to(weight.dtype) if needs_weight else None  # -> [E, H]
        grad_bias = grad.sum(0).to(ctx.bias_dtype) if needs_bias else None  # -> [E]
        return grad_inp, grad_weight, grad_bias, None


def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """Return the router logits inp @ weight^T + bias, computed in router_dtype, under autocast too.

    Args:
        inp: [..., H], any float dtype.
        weight: [E, H], any float dtype.
        bias: [E] or None.
        router_dtype: torch.float32 or torch.float64.

    Returns:
        [..., E] in router_dtype. Gradients return in the dtype of what they belong to; the products of backward are
        computed in router_dtype too. Saved for backward: inp and weight themselves.

    Raises:
        ValueError: router_dtype is neither float32 nor float64.
    """
    if router_dtype not in (torch.float32, torch.float64):
        raise ValueError(f"router_dtype ({router_dtype}) must be torch.float32 or torch.float64.")
    logits = _RouterGatingLinear.apply(inp.reshape(-1, inp.shape[-1]), weight, bias, router_dtype)
    return logits.view(*inp.shape[:-1], weight.shape[0])


def apply_input_jitter(hidden_states: Tensor, eps: float, router_dtype: torch.dtype) -> Tensor:
    """Return hidden_states times noise that is uniform in [1 - eps, 1 + eps), in router_dtype: bf16 has no 1.001.

    The noise comes from torch's default generator of the device, whose state activation checkpointing restores.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2. Differs from Megatron-Core, which draws in the dtype of
        hidden_states.
    """
    noise = torch.empty_like(hidden_states, dtype=router_dtype).uniform_(1.0 - eps, 1.0 + eps)
    return hidden_states * noise


class _RandomLogits(torch.autograd.Function):
    """Random values in forward, the identity in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return torch.randn_like(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def apply_random_logits(logits: Tensor) -> Tensor:
    """Return standard normal values in place of logits, through which gradients pass as if nothing had happened.

    For benchmarks with an even load. The values come from torch's default generator of the device.

    Source: Megatron-Core moe_utils, function of the same name.
    """
    return _RandomLogits.apply(logits)
