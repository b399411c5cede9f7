"""TopKRouter: decides which experts see a token, and with what weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from router.collectives import all_reduce_counts, group_of_one
from router.config import ROUTER_DTYPES, RouterConfig
from router.gating import router_gating_linear
from router.losses import (
    attach_loss,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from router.topk import topk_routing_with_score_function


class RouterGroups(Protocol):
    """What the router asks of its groups: the ranks that hold slices of one micro-batch."""

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """Ranks that share a micro-batch: tensor (sequence slices) and context parallel."""

    @property
    def cp(self) -> dist.ProcessGroup:
        """Context-parallel ranks."""


class TopKRouter(nn.Module):
    """Linear gate, score function, top-k, balancing losses.

    Args:
        config: see RouterConfig.
        groups: process groups; None on one process. Balancing losses span `groups.tp_cp`, whose ranks hold slices of
            one micro-batch.

    Attributes:
        weight: [E, H] parameter in params_dtype.
        bias: [E] parameter, or None without add_bias_linear.
        tokens_per_expert: [E] int64 buffer, slots this rank routed to each expert since it was last zeroed; advances
            in training with gradients enabled alone.
        aux_loss, z_loss: [] fp32 buffers, the last losses without their coefficient. Their mean over all ranks is the
            loss to log; the gradient takes its own way.
    """

    bias: nn.Parameter | None
    tokens_per_expert: Tensor
    aux_loss: Tensor
    z_loss: Tensor

    def __init__(self, config: RouterConfig, groups: RouterGroups | None = None) -> None:
        super().__init__()
        self.config = config
        self.router_dtype = ROUTER_DTYPES[config.moe_router_dtype]
        self.tp_cp_group = groups.tp_cp if groups else group_of_one()
        self.cp_size = groups.cp.size() if groups else 1
        num_experts = config.num_moe_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, dtype=config.params_dtype))
        bias = nn.Parameter(torch.empty(num_experts, dtype=config.params_dtype)) if config.add_bias_linear else None
        self.register_parameter("bias", bias)
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("aux_loss", torch.zeros((), dtype=torch.float32), persistent=False)
        self.register_buffer("z_loss", torch.zeros((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gate from a normal distribution (torch's default generator); zero the bias and the counters."""
        nn.init.normal_(self.weight, std=self.config.init_method_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for buffer in (self.tokens_per_expert, self.aux_loss, self.z_loss):
            buffer.zero_()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            hidden_states: [S, B, H], or any shape that ends in H; any float dtype.

        Returns:
            probs [T, E] in moe_router_dtype, zero where not routed; routing_map [T, E] bool. Both are read-only.

        Raises:
            ValueError: the last dimension of hidden_states is not hidden_size.

        Collectives: with a balancing loss in training and more than one rank in tp_cp, one all_reduce of [E + 1] int64
            over tp_cp. No host sync.
        """
        config = self.config
        if hidden_states.shape[-1] != config.hidden_size:
            raise ValueError(
                f"hidden_states ({tuple(hidden_states.shape)}) must end in hidden_size ({config.hidden_size})."
            )
        hidden_states = hidden_states.reshape(-1, config.hidden_size)  # [S, B, H] -> [T, H]
        logits = router_gating_linear(hidden_states, self.weight, self.bias, self.router_dtype)  # [T, H] -> [T, E]
        probs, routing_map = topk_routing_with_score_function(
            self._with_losses(logits),
            config.moe_router_topk,
            config.moe_router_pre_softmax,
            score_function=config.moe_router_score_function,
            fused=config.moe_router_fusion,
        )  # [T, E] -> [T, E], [T, E]
        if self._learns:
            self.tokens_per_expert += routing_map.sum(0)
        return probs, routing_map

    @property
    def _learns(self) -> bool:
        """Whether losses and counters apply: in training, and not under no_grad."""
        return self.training and torch.is_grad_enabled()

    def _with_losses(self, logits: Tensor) -> Tensor:
        """Return logits [T, E] with the balancing losses attached; the same tensor if there are none."""
        config, tp_cp_size = self.config, self.tp_cp_group.size()
        if not self._learns or not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
            return logits
        routing_map, scores = compute_routing_scores_for_aux_loss(
            logits, config.moe_router_topk, config.moe_router_score_function
        )
        counts = F.pad(routing_map.sum(0), (0, 1), value=logits.shape[0])  # [E] counts, then the number of tokens
        counts = all_reduce_counts(counts, group=self.tp_cp_group)  # [E + 1]
        total_num_tokens = counts[-1]
        loss = logits.new_zeros(())
        if config.moe_aux_loss_coeff:
            aux_loss = switch_load_balancing_loss_func(
                scores, counts[:-1], total_num_tokens, config.moe_router_topk, config.num_moe_experts, 1.0
            )
            self.aux_loss.copy_(aux_loss.detach() * tp_cp_size)
            loss = loss + config.moe_aux_loss_coeff * aux_loss
        if config.moe_z_loss_coeff:
            z_loss = z_loss_func(logits, 1.0, total_num_tokens)
            self.z_loss.copy_(z_loss.detach() * tp_cp_size)
            loss = loss + config.moe_z_loss_coeff * z_loss
        # Gradients are summed over TP and averaged over CP; with CP's factor undone the shares add up to the loss.
        return attach_loss(logits, loss, scale=float(self.cp_size))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Move the module as nn.Module does, but keep the loss buffers in fp32."""
        super()._apply(fn, recurse)
        self.aux_loss, self.z_loss = self.aux_loss.float(), self.z_loss.float()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TopKRouter:
        """Copy parameters, buffers and hooks; the copy shares the process group."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.tp_cp_group)] = self.tp_cp_group
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Show what is decided and how when the module is printed."""
        config = self.config
        softmax = "pre-softmax" if config.moe_router_pre_softmax else config.moe_router_score_function
        return (
            f"experts={config.num_moe_experts}, topk={config.moe_router_topk}, score={softmax},"
            f" dtype={config.moe_router_dtype}, fusion={config.moe_router_fusion}"
        )
