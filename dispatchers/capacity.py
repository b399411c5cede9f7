"""The all-to-all dispatcher of capacity mode: every expert takes the same number of slots, so all shapes are static."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dispatchers.base import Counts, DispatcherGroups, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.collectives import (
    RowsInFlight,
    SumInFlight,
    all_gather_counts,
    all_gather_rows,
    reduce_scatter_rows,
    start_all_gather_rows,
    start_all_to_all_rows,
)
from dispatchers.config import DispatcherConfig
from dispatchers.permutation import gather_rows, slot_probs, sum_rows


@dataclass(frozen=True)
class CapacityPlan:
    """What the later stages need to know.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        token_ids: [E * C] int64, the token of each slot, by expert; T for an empty slot.
        capacity: C, slots of an expert for the tokens of one rank.
    """

    hidden_shape: tuple[int, ...]
    token_ids: Tensor
    capacity: int


class MoECapacityTokenDispatcher(TokenDispatcher[CapacityPlan]):
    """All-to-all with equal splits: each rank sends C slots to every expert, those without a token as zeros.

    Sizes follow from the configuration alone: no counts travel, nothing is copied to the host, and a CUDA graph can
    capture dispatch and combine. Experts get C slots of every rank of tp_ep.

    Args:
        config: see DispatcherConfig.
        groups: process groups; None on one process.
        capacity_of: C for a number of tokens.
        num_tokens: the tokens that C is computed from, the same on all ranks; a rank may have any number. None: this
            rank's own number. Then all ranks must have the same, which the first dispatch makes sure of with one
            all_gather and one host sync; later ones must have it too.
        pad_multiple: C is rounded up to it.

    Collectives: dispatch: all_to_all of rows [E * C, H] and of probs [E * C] over ep, all_gather (as all_to_all) of
        both over etp. combine: reduce_scatter (as all_to_all) over etp, all_to_all over ep. Backward likewise. No host
        sync.

    Saved for backward: 16 bytes per slot sent, 8 per slot held.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2; Megatron-Core moe_pad_expert_input_to_capacity.
    """

    def __init__(
        self,
        config: DispatcherConfig,
        groups: DispatcherGroups | None = None,
        *,
        capacity_of: Callable[[int], int],
        num_tokens: int | None = None,
        pad_multiple: int = 1,
    ) -> None:
        super().__init__(config, groups, pad_multiple=pad_multiple)
        self.capacity_of, self.num_tokens = capacity_of, num_tokens
        self.agreed_tokens: int | None = None  # what all ranks had at the first dispatch

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return no counts."""
        return routing_map.new_empty(0, dtype=torch.int64)

    def gather_counts(self, counts: Sequence[Tensor]) -> list[Counts]:
        """Nothing needs to be told."""
        if len(counts) > 1:
            raise ValueError(f"num_chunks ({len(counts)}) must be 1 in capacity mode, whose shapes are static.")
        return [Counts(each, each) for each in counts]

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, CapacityPlan]:
        """Send C slots to every expert: [T, H] -> [ep * L * C, H]."""
        num_tokens = local.tokens.shape[0]
        capacity = self.capacity_of(self._agreed(num_tokens, local.tokens.device))
        capacity += -capacity % self.pad_multiple
        token_ids = _slot_tokens(local.routing_map, capacity)  # [E * C]
        plan = CapacityPlan(local.hidden_shape, token_ids, capacity)
        expert_ids = torch.arange(self.num_experts, device=token_ids.device).repeat_interleave(capacity)
        probs = slot_probs(F.pad(local.probs, (0, 0, 0, 1)), token_ids, expert_ids)  # [E * C], 0 where empty
        if not self.moves:
            return InTransit(RowsInFlight(local.tokens), RowsInFlight(probs)), plan
        rows = gather_rows(F.pad(local.tokens, (0, 0, 0, 1)), token_ids)  # [E * C, H], zeros where empty
        splits, ep = [self.num_local_experts * capacity] * self.ep_group.size, self.ep_group
        moving = start_all_to_all_rows(rows, splits, splits, group=ep, what="dispatch rows", payload=self.payload)
        return InTransit(moving, start_all_to_all_rows(probs, splits, splits, group=ep, what="dispatch probs")), plan

    def dispatch_postprocess(self, in_transit: InTransit, plan: CapacityPlan) -> tuple[ExpertInput, CapacityPlan]:
        """Receive, share with the ranks of the same experts, and sort by expert: -> [R, H]."""
        rows, probs = in_transit.rows.wait(), in_transit.probs.wait()
        if self.moves:
            sizes = self._etp_sizes(plan)
            gathering = start_all_gather_rows(
                rows, sizes, group=self.etp_group, what="dispatch rows", payload=self.payload
            )
            probs = all_gather_rows(probs, sizes, group=self.etp_group, what="dispatch probs")
            rows = gathering.wait()  # -> [R, H]
            places = torch.arange(rows.shape[0], device=rows.device)
            places = places.view(self.etp_group.size, self.ep_group.size, self.num_local_experts, plan.capacity)
            row_ids = places.permute(2, 1, 0, 3).reshape(-1)  # by etp, ep, expert -> by expert, ep, etp
            probs = probs.index_select(0, row_ids)
        else:
            num_tokens = rows.shape[0]
            row_ids = plan.token_ids.masked_fill(plan.token_ids == num_tokens, -1)
        slots = self.tp_ep_group.size * plan.capacity
        counts = torch.full((self.num_local_experts,), slots, device=rows.device)
        count_list = (slots,) * self.num_local_experts
        return ExpertInput(rows, row_ids, probs, counts, count_list, has_padding=not self.moves), plan

    def token_combine(self, rows: Tensor, plan: CapacityPlan) -> RowsInFlight:
        """Send every slot back: [R, H] -> [E * C, H]; on one rank [T, H] as it is."""
        if not self.moves:
            return RowsInFlight(rows)
        rows = reduce_scatter_rows(rows, self._etp_sizes(plan), group=self.etp_group, what="combine rows")
        splits = [self.num_local_experts * plan.capacity] * self.ep_group.size
        return start_all_to_all_rows(rows, splits, splits, group=self.ep_group, what="combine rows")

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: CapacityPlan) -> Tensor:
        """Add up the slots of each token: [E * C, H] -> hidden_shape."""
        rows = returning.wait()
        if self.moves:
            num_tokens = torch.Size(plan.hidden_shape[:-1]).numel()
            rows = sum_rows(rows, plan.token_ids, num_tokens + 1)[:num_tokens]  # -> [T, H]
        return rows.reshape(*plan.hidden_shape[:-1], rows.shape[-1])

    def _etp_sizes(self, plan: CapacityPlan) -> list[int]:
        """Return the rows that each expert-tensor-parallel rank received over ep."""
        return [self.ep_group.size * self.num_local_experts * plan.capacity] * self.etp_group.size

    def _agreed(self, num_tokens: int, device: torch.device) -> int:
        """Return the number of tokens that all ranks compute their capacity from."""
        if self.num_tokens is not None:
            return self.num_tokens
        if not self.moves:
            return num_tokens
        way_out = "set moe_expert_capacity_tokens to the largest number of tokens of a rank"
        if self.agreed_tokens is None:
            own = torch.tensor([num_tokens], device=device)
            found = all_gather_counts(own, group=self.tp_ep_group).flatten().tolist()  # sync: first dispatch alone
            if len(set(found)) > 1:
                raise ValueError(
                    f"In capacity mode the ranks must have the same number of tokens; they have {found}; {way_out}."
                )
            self.agreed_tokens = num_tokens
        if self.agreed_tokens != num_tokens:
            raise ValueError(
                f"The number of tokens ({num_tokens}) must stay what it was at the first dispatch"
                f" ({self.agreed_tokens}): the other ranks size their buffers by it; {way_out}."
            )
        return num_tokens


def _slot_tokens(routing_map: Tensor, capacity: int) -> Tensor:
    """Return the token of each slot, T for an empty one: [T, E] bool -> [E * C] int64, by expert then token."""
    num_tokens, num_experts = routing_map.shape
    place = routing_map.cumsum(0) - 1  # [T, E], the slot that a token takes
    fits = ~routing_map | (place < capacity)
    torch._assert_async(
        fits.all(), f"An expert has more tokens than its capacity ({capacity}); a router must drop them."
    )
    experts = torch.arange(num_experts, device=routing_map.device)
    nowhere = num_experts * capacity
    slots = torch.where(routing_map & fits, experts * capacity + place, nowhere)  # [T, E]
    tokens = torch.arange(num_tokens, device=routing_map.device).unsqueeze(1).expand(-1, num_experts)
    token_ids = slots.new_full((nowhere + 1,), num_tokens)
    return token_ids.scatter_(0, slots.reshape(-1), tokens.reshape(-1))[:nowhere]
