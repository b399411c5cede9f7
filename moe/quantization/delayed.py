"""Delayed scaling: scales that follow from the largest magnitudes of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from moe.parallel import ProcessGroups, local_tensor, max_over_replicas, shard_expert_buffer
from moe.quantization.recipes import Operand

OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")
NUM_LINEARS = 2


class DelayedScaling(nn.Module):
    """The largest magnitudes of the operands of each expert's two linears, and the scales that follow from them.

    Within a step scales stay as they are, and the step's largest magnitudes are collected: a recomputation finds the
    same scales, and seeing the same values again changes nothing. `update_delayed_scales` ends the step. As long as a
    scale is 0 (nothing was seen), the tensor's own magnitude is used instead.

    Args:
        num_local_experts: L.
        groups: process groups; None on one process.
        history_len: steps that a scale remembers.
        algo: a scale follows from the "max" of the history or from the "most_recent" step.
        margin: scales leave this many powers of two of room above it.

    Attributes:
        amax_history: [L, 6, history_len] fp32, latest first: input, weight and gradient of fc1, then of fc2. With
            several ranks a DTensor [E, ...].
        scale: [L, 6] fp32, amax; 0 where nothing was seen. The format's largest number and the margin come in when it
            is used.
        amax: [L, 6] fp32, of this step so far; not in checkpoints, which lie between steps.

    Source: FP8 Formats for Deep Learning, arXiv:2209.05433, section 4; Transformer Engine's DelayedScaling. Differs:
        the amax of an expert that saw no token keeps its scale; the first step scales by its own magnitudes, not by 1.
    """

    amax_history: Tensor
    scale: Tensor
    amax: Tensor

    def __init__(
        self,
        num_local_experts: int,
        groups: ProcessGroups | None,
        history_len: int,
        algo: Literal["max", "most_recent"],
        margin: int,
    ) -> None:
        super().__init__()
        self.algo, self.margin, self.groups = algo, margin, groups
        shape = (num_local_experts, NUM_LINEARS * len(OPERANDS))
        self.register_buffer("amax_history", shard_expert_buffer(torch.zeros(*shape, history_len), groups))
        self.register_buffer("scale", shard_expert_buffer(torch.zeros(shape), groups))
        self.register_buffer("amax", torch.zeros(shape), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DelayedScaling:
        """Move buffers, but keep them in fp32 and their values exact."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != torch.float32:
                self._buffers[name] = before.to(after.device)
        return self

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything."""
        for buffer in self.buffers():
            local_tensor(buffer).zero_()

    def amax_of(self, expert: int, linear: int, operand: Operand) -> Tensor:
        """Return the largest magnitude [] fp32 that a tensor is scaled for; 0 where nothing was seen."""
        return local_tensor(self.scale)[expert, linear * len(OPERANDS) + OPERANDS.index(operand)] * 2.0**self.margin

    @torch.no_grad()
    def record(self, amax: Tensor, expert: int, linear: int, operand: Operand) -> None:
        """Take the largest magnitude [] fp32 of a tensor into account."""
        place = linear * len(OPERANDS) + OPERANDS.index(operand)
        self.amax[expert, place] = torch.maximum(self.amax[expert, place], amax.nan_to_num(0.0, posinf=0.0))

    @torch.no_grad()
    def update(self) -> None:
        """Roll the history and compute the next scales.

        Collectives: all_reduce (max) of [L, 6] fp32 over edp and over etp.
        """
        amax = self.amax if self.groups is None else max_over_replicas(self.amax, self.groups)
        history, scale = local_tensor(self.amax_history), local_tensor(self.scale)
        history.copy_(torch.cat([amax.unsqueeze(-1), history[..., :-1]], dim=-1))
        chosen = history.amax(-1) if self.algo == "max" else history[..., 0]
        scale.copy_(torch.where(chosen > 0, chosen, scale))
        self.amax.zero_()

    def extra_repr(self) -> str:
        """Show the rule when the module is printed."""
        return f"history_len={self.amax_history.shape[-1]}, algo={self.algo}, margin={self.margin}"


def update_delayed_scales(model: nn.Module) -> int:
    """End a step of delayed scaling: call it after the optimizer's, on every rank.

    Returns:
        How many layers have delayed scaling.

    Collectives: those of `DelayedScaling.update` for each, in the order of the model's modules.
    """
    found = [module for module in model.modules() if isinstance(module, DelayedScaling)]
    for module in found:
        module.update()
    return len(found)
