"""How torch.compile sees buffers that change between forward and backward: behind an object that operators get.

A compiler computes in forward what it can, so a traced backward would add counts to what a buffer held in forward (of
several micro-batches in flight the last one would overwrite the others) and scale losses by an old scale. An operator
that gets the module reads and writes when it runs.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# No public way hands an operator anything but tensors and numbers.
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from router.collectives import all_reduce_sum
from router.losses import on_backward


class ModuleHandle(OpaqueBase):
    """A module as an input of a compiled graph. It does not keep the module alive, and is copied with it.

    Args:
        module: the module that holds this handle.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Any:
        """The module, which is alive: it runs."""
        module = self._module()
        assert module is not None
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHandle, (self.module,)


register_opaque_type(ModuleHandle, typ="reference")


@torch.library.custom_op("router::advance", mutates_args=())
def _advance(handle: ModuleHandle, names: str, amounts: list[Tensor], tensor: Tensor, in_backward: bool) -> Tensor:
    advance = partial(handle.module.advance, dict(zip(names.split(), amounts, strict=True)))
    if in_backward:
        advance()
    else:
        on_backward(tensor, advance)  # at once, but for a repetition
    return tensor.clone()


@_advance.register_fake
def _(handle: ModuleHandle, names: str, amounts: list[Tensor], tensor: Tensor, in_backward: bool) -> Tensor:
    return torch.empty_like(tensor)


@torch.library.custom_op("router::read", mutates_args=())
def _read(handle: ModuleHandle, name: str, size: list[int], dtype: torch.dtype, after: Tensor) -> Tensor:
    return getattr(handle.module, name).clone()


@_read.register_fake
def _(handle: ModuleHandle, name: str, size: list[int], dtype: torch.dtype, after: Tensor) -> Tensor:
    return after.new_empty(size, dtype=dtype)


@torch.library.custom_op("router::all_reduce_sum", mutates_args=())
def _all_reduce_sum(handle: ModuleHandle, values: Tensor, name: str) -> Tensor:
    groups = handle.module.loss_groups
    return all_reduce_sum(values, group=getattr(groups, name), name=name, counter=groups.counter)


@_all_reduce_sum.register_fake
def _(handle: ModuleHandle, values: Tensor, name: str) -> Tensor:
    return torch.empty_like(values)


class _AdvanceOnBackward(torch.autograd.Function):
    """Identity on a tensor; in backward a module counts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, handle: ModuleHandle, names: str, *amounts: Tensor) -> Tensor:
        ctx.handle, ctx.names = handle, names
        ctx.save_for_backward(*amounts)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        amounts = ctx.saved_tensors
        grad = torch.ops.router.advance(ctx.handle, ctx.names, list(amounts), grad, True)
        return grad, None, None, *(None for _ in amounts)


def advance_on_backward(tensor: Tensor, handle: ModuleHandle, advance: dict[str, Tensor]) -> Tensor:
    """Return tensor unchanged; `handle.module.advance(advance)` runs once, when `router.losses.on_backward` would.

    Args:
        tensor: any shape.
        handle: of the module that counts.
        advance: buffer -> what is added to it.
    """
    names, amounts = " ".join(advance), list(advance.values())
    if not tensor.requires_grad:
        return torch.ops.router.advance(handle, names, amounts, tensor, False)
    return _AdvanceOnBackward.apply(tensor, handle, names, *amounts)


class _AttachLoss(torch.autograd.Function):
    """`router.losses.attach_loss` with the module's loss_scale."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, handle: ModuleHandle) -> Tensor:
        ctx.handle, ctx.loss_dtype = handle, loss.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.ops.router.read(ctx.handle, "loss_scale", [], torch.float32, grad)
        return grad, scale.to(ctx.loss_dtype), None


def attach_loss(tensor: Tensor, loss: Tensor, handle: ModuleHandle) -> Tensor:
    """Return tensor with loss attached as `router.losses.attach_loss` does; the scale is `handle.module.loss_scale`.

    Args:
        tensor: any shape.
        loss: [].
        handle: of a router.
    """
    return _AttachLoss.apply(tensor, loss, handle)


def current_value(handle: ModuleHandle, name: str, buffer: Tensor) -> Tensor:
    """Return a copy of a module's buffer as it is at this point, which later writes do not change.

    Args:
        handle: of the module.
        name: of the buffer.
        buffer: the buffer, for its shape, dtype and device.
    """
    return torch.ops.router.read(handle, name, list(buffer.shape), buffer.dtype, buffer)


def sum_over_group(values: Tensor, handle: ModuleHandle, name: str) -> Tensor:
    """Return `router.collectives.all_reduce_sum` over a group of a router; its counter does not recompile the graph.

    Args:
        values: any shape, without a gradient.
        handle: of the router.
        name: the attribute of its loss_groups.

    Collectives: one all_reduce of the values over the group; none if it is None.
    """
    return torch.ops.router.all_reduce_sum(handle, values, name)
