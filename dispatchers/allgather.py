"""The all-gather dispatcher: every rank gets every token and computes those of its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatchers.base import Counts, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.collectives import (
    RowsInFlight,
    SumInFlight,
    start_all_gather_rows,
    start_all_to_all_rows,
    start_reduce_scatter_rows,
)
from dispatchers.permutation import routed_slots, slot_probs


@dataclass(frozen=True)
class AllGatherPlan:
    """What the later stages need to know.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        sizes: tokens of each rank of tp_ep.
        tokens_per_expert: [L] int64, slots of each local expert.
        tokens_per_expert_list: the same on the host.
    """

    hidden_shape: tuple[int, ...]
    sizes: tuple[int, ...]
    tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...]


class MoEAllGatherTokenDispatcher(TokenDispatcher[AllGatherPlan]):
    """Dispatch by all-gather over EP x ETP; combine by reduce-scatter. For small groups and many experts per token.

    R is the number of tokens of all ranks; slots read them by index. Where a token has an expert on most ranks this
    moves the fewest rows in the simplest way; with K much smaller than the number of ranks it moves the most.

    Collectives: dispatch: all_gather of [E + 1] int64 over tp_ep; all_gather (as all_to_all) of rows [T, H], all_to_all
        of probs [T, L] and of the map [T, L] for each rank's experts, all over tp_ep. combine: reduce_scatter (as
        all_to_all) of rows over tp_ep. Backward runs the mirror image. One device-to-host copy per dispatch, none
        elsewhere.

    Saved for backward: int64 indices, 8 bytes per slot held.

    Source: Megatron-Core token_dispatcher, class of the same name. Differs: ranks may hold different numbers of tokens.
    """

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return [E + 1] int64: slots of each expert and the number of tokens."""
        return torch.cat(
            [super().counts_of(routing_map), routing_map.new_full((1,), routing_map.shape[0], dtype=torch.int64)]
        )

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, AllGatherPlan]:
        """Send all tokens to all ranks: [T, H] -> [R, H]."""
        group, first = self.tp_ep_group, self.ep_group.rank * self.num_local_experts
        here = slice(first, first + self.num_local_experts)
        sizes = tuple(counts.host[:, -1].tolist())
        plan = AllGatherPlan(
            local.hidden_shape, sizes, counts.device[:, here].sum(0), tuple(counts.host[:, here].sum(0).tolist())
        )
        splits = (sizes, [local.tokens.shape[0]] * group.size)
        rows = start_all_gather_rows(local.tokens, sizes, group=group, what="dispatch rows", payload=self.payload)
        probs = start_all_to_all_rows(self._by_rank(local.probs), *splits, group=group, what="dispatch probs")
        routing_map = start_all_to_all_rows(self._by_rank(local.routing_map), *splits, group=group, what="dispatch map")
        return InTransit(rows, probs, routing_map), plan

    def _by_rank(self, columns: Tensor) -> Tensor:
        """Return for each rank the columns of its experts: [T, E] -> [n * T, L], rank-major."""
        by_rank = columns.view(columns.shape[0], self.ep_group.size, self.num_local_experts).transpose(0, 1)
        return by_rank.repeat_interleave(self.etp_group.size, 0).flatten(0, 1)  # [ep, T, L] -> [n * T, L]

    def dispatch_postprocess(self, in_transit: InTransit, plan: AllGatherPlan) -> tuple[ExpertInput, AllGatherPlan]:
        """Receive, and list the slots by expert."""
        if in_transit.ids is None:
            raise TypeError("ids (None) must be the routing map under way.")
        row_ids, expert_ids = routed_slots(in_transit.ids.wait(), sum(plan.tokens_per_expert_list))
        probs = slot_probs(in_transit.probs.wait(), row_ids, expert_ids)
        counts = plan.tokens_per_expert, plan.tokens_per_expert_list
        return ExpertInput.padded(in_transit.rows.wait(), row_ids, probs, *counts, self.pad_multiple), plan

    def token_combine(self, rows: Tensor, plan: AllGatherPlan) -> RowsInFlight | SumInFlight:
        """Send every rank its tokens' addends: [R, H] -> [T, H]."""
        return start_reduce_scatter_rows(rows, plan.sizes, group=self.tp_ep_group, what="combine rows")

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: AllGatherPlan) -> Tensor:
        """Receive the sums: [T, H] -> hidden_shape."""
        rows = returning.wait()
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])
