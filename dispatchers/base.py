"""The contract between dispatcher and experts, and the stages that every dispatcher has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from dispatchers.collectives import group_of_one
from dispatchers.config import DispatcherConfig


class DispatcherGroups(Protocol):
    """What a dispatcher asks of its groups."""

    @property
    def ep(self) -> dist.ProcessGroup:
        """Expert-parallel ranks: each holds E / ep_size experts."""

    @property
    def etp(self) -> dist.ProcessGroup:
        """Expert-tensor-parallel ranks: each holds a slice of the F dimension of the same experts."""

    @property
    def tp_ep(self) -> dist.ProcessGroup:
        """Both together, rank = ep_rank * etp_size + etp_rank."""


@dataclass(frozen=True)
class ExpertInput:
    """What experts compute on. Experts return [R, H]: for each row the sum over its slots.

    Attributes:
        tokens: [R, H], the rows this rank holds after communication.
        row_ids: [M] int64, sorted by local expert, the row that a slot reads; -1 is a padding slot: it reads zeros
            and writes nowhere.
        probs: [M] fp32 or fp64, the weight of each slot; 0 for padding slots.
        tokens_per_expert: [L] int64, slots of each local expert, padding included; sums to M.
        tokens_per_expert_list: the same on the host.
        num_padding_slots: how many entries of row_ids are -1.

    Raises:
        ValueError: counts that do not sum to M.
    """

    tokens: Tensor
    row_ids: Tensor
    probs: Tensor
    tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...]
    num_padding_slots: int = 0

    def __post_init__(self) -> None:
        """Check the sizes, which the host knows."""
        num_slots = sum(self.tokens_per_expert_list)
        if not num_slots == self.row_ids.shape[0] == self.probs.shape[0]:
            raise ValueError(
                f"tokens_per_expert_list sums to {num_slots} slots, but row_ids has {self.row_ids.shape[0]} and probs"
                f" {self.probs.shape[0]}."
            )


@dataclass(frozen=True)
class LocalTokens:
    """This rank's tokens before they travel.

    Attributes:
        tokens: [T, H].
        probs: [T, E].
        routing_map: [T, E] bool, True where routed.
        tokens_per_expert: [E] int64, column sums of the map.
        hidden_shape: the shape that combine restores.
    """

    tokens: Tensor
    probs: Tensor
    routing_map: Tensor
    tokens_per_expert: Tensor
    hidden_shape: tuple[int, ...]


@dataclass(frozen=True)
class ReceivedRows:
    """What this rank holds after communication, still in the order of arrival.

    Attributes:
        rows: [R, H].
        probs: [M] in the order in which experts will read the slots.
        row_ids: [M] int64, sorted by local expert, the row that each slot reads; no padding yet.
        tokens_per_expert: [L] int64.
        tokens_per_expert_list: the same on the host.
    """

    rows: Tensor
    probs: Tensor
    row_ids: Tensor
    tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...]


Plan = TypeVar("Plan")


class TokenDispatcher(nn.Module, ABC, Generic[Plan]):
    """Moves tokens to their experts and the results back.

    A dispatcher keeps nothing between calls: what combine needs travels in the plan that dispatch returns, so several
    micro-batches may be in flight and recomputation is safe. Communication happens in token_dispatch and
    token_combine alone.

    Args:
        config: see DispatcherConfig.
        groups: process groups; None on one process.
        pad_multiple: slots of every non-empty expert are padded to this multiple with -1 slots; 1 pads nothing.

    Raises:
        ValueError: num_moe_experts is not divisible by the expert-parallel size; pad_multiple < 1.
    """

    def __init__(
        self, config: DispatcherConfig, groups: DispatcherGroups | None = None, *, pad_multiple: int = 1
    ) -> None:
        super().__init__()
        if pad_multiple < 1:
            raise ValueError(f"pad_multiple ({pad_multiple}) must be at least 1.")
        alone = group_of_one()
        self.ep_group = groups.ep if groups else alone
        self.etp_group = groups.etp if groups else alone
        self.tp_ep_group = groups.tp_ep if groups else alone
        num_experts, ep_size = config.num_moe_experts, self.ep_group.size()
        if num_experts % ep_size:
            lower = num_experts // ep_size * ep_size
            nearest = [n for n in (lower, lower + ep_size) if n]
            raise ValueError(
                f"num_moe_experts ({num_experts}) must be divisible by the expert-parallel size ({ep_size});"
                f" the nearest such numbers of experts are {nearest}."
            )
        self.num_local_experts = num_experts // ep_size
        self.pad_multiple = pad_multiple
        self.check_collectives = config.moe_check_collectives

    def dispatch(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[ExpertInput, Plan]:
        """Bring every routed token to its experts.

        Args:
            hidden_states: [..., H], T tokens.
            probs: [T, E], zero where not routed.
            routing_map: [T, E] bool, True where routed.

        Returns:
            The experts' input, and the plan for `combine`.
        """
        local = self.dispatch_preprocess(hidden_states, probs, routing_map)
        received, plan = self.token_dispatch(local)
        return self.dispatch_postprocess(received), plan

    def combine(self, expert_output: Tensor, plan: Plan) -> Tensor:
        """Bring expert outputs back and add up each token's.

        Args:
            expert_output: [R, H], the experts' result for each row of ExpertInput.tokens.
            plan: what dispatch returned.

        Returns:
            The shape of hidden_states at dispatch.
        """
        rows = self.combine_preprocess(expert_output, plan)
        rows = self.token_combine(rows, plan)
        return self.combine_postprocess(rows, plan)

    @abstractmethod
    def dispatch_preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> LocalTokens:
        """Local work before tokens travel: [..., H] -> [T, H]."""

    @abstractmethod
    def token_dispatch(self, local: LocalTokens) -> tuple[ReceivedRows, Plan]:
        """Communicate: [T, H] -> [R, H]."""

    @abstractmethod
    def dispatch_postprocess(self, received: ReceivedRows) -> ExpertInput:
        """Local work after tokens arrived."""

    @abstractmethod
    def combine_preprocess(self, expert_output: Tensor, plan: Plan) -> Tensor:
        """Local work before results travel: [R, H] -> [R, H]."""

    @abstractmethod
    def token_combine(self, rows: Tensor, plan: Plan) -> Tensor:
        """Communicate: [R, H] -> the rows this rank sent."""

    @abstractmethod
    def combine_postprocess(self, rows: Tensor, plan: Plan) -> Tensor:
        """Local work after results arrived: to the shape of hidden_states."""

    def extra_repr(self) -> str:
        """Show the groups' sizes when the module is printed."""
        return (
            f"ep={self.ep_group.size()}, etp={self.etp_group.size()}, local_experts={self.num_local_experts},"
            f" pad_multiple={self.pad_multiple}"
        )
