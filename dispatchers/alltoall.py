"""The all-to-all dispatcher: each (token, expert) pair is a row that travels to the expert's rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatchers.base import Counts, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.collectives import (
    RowsInFlight,
    SumInFlight,
    all_gather_rows,
    reduce_scatter_rows,
    start_all_gather_rows,
    start_all_to_all_rows,
)
from dispatchers.permutation import gather_rows, reorder_blocks, routed_slots, slot_probs, sum_rows


@dataclass(frozen=True)
class AlltoAllPlan:
    """What the later stages need to know.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        token_ids: [rows sent] int64, the local token of each row sent; sorted by expert.
        input_splits: rows sent to each expert-parallel rank.
        output_splits: rows received from each expert-parallel rank.
        etp_sizes: rows that each expert-tensor-parallel rank received.
        tokens_per_source: [L, ep * etp] int64, rows of each local expert by the rank of tp_ep that sent them.
        tokens_per_expert_list: rows of each local expert, on the host.
    """

    hidden_shape: tuple[int, ...]
    token_ids: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    etp_sizes: tuple[int, ...]
    tokens_per_source: Tensor
    tokens_per_expert_list: tuple[int, ...]


class MoEAlltoAllTokenDispatcher(TokenDispatcher[AlltoAllPlan]):
    """Dispatch by all-to-all over EP and all-gather over ETP; combine by reduce-scatter and all-to-all.

    On one rank (EP = ETP = 1) nothing moves and nothing is copied: R = T, and the slots read the tokens by index.
    Otherwise each slot is a row of its own: R = M before padding. So it is on one rank in deterministic mode, where a
    token's rows are added up in the order of the experts, whatever the number of ranks.

    Collectives: dispatch: all_gather of [E] int64 over tp_ep; all_to_all of rows [*, H] and of probs [*] over ep;
        all_gather (as all_to_all) of both over etp. combine: reduce_scatter (as all_to_all) over etp, all_to_all over
        ep, rows alone. Backward runs the mirror image. One device-to-host copy (the counts) per dispatch, none in
        combine or backward. The exchange over etp, between ranks that hold the same experts, is not overlapped.

    Saved for backward: int64 indices alone. One rank: 8 bytes per slot. More ranks: 16 per row sent and 8 per row held.
        Slot padding: 8 more per slot held.

    Source: Megatron-Core token_dispatcher, class of the same name.
    """

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, AlltoAllPlan]:
        """Send each routed token to the ranks of its experts: [T, H] -> [rows received, H]."""
        shape = (self.ep_group.size, self.etp_group.size, self.ep_group.size, self.num_local_experts)
        ep_rank, etp_rank = self.ep_group.rank, self.etp_group.rank
        here = counts.device.view(shape)[:, :, ep_rank].flatten(0, 1)  # [ep * etp, L], rows that come here
        table = counts.host.view(shape)  # source ep, source etp, expert's rank, expert
        here_host = table[:, :, ep_rank]  # [ep, etp, L]
        input_splits = tuple(table[ep_rank, etp_rank].sum(-1).tolist())
        token_ids, expert_ids = routed_slots(local.routing_map, sum(input_splits))
        plan = AlltoAllPlan(
            local.hidden_shape,
            token_ids,
            input_splits,
            tuple(here_host[:, etp_rank].sum(-1).tolist()),
            tuple(here_host.sum((0, 2)).tolist()),
            here.t(),
            tuple(here_host.sum((0, 1)).tolist()),
        )
        probs = slot_probs(local.probs, token_ids, expert_ids)  # [rows sent]
        if not self._has_row_per_slot:
            return InTransit(RowsInFlight(local.tokens), RowsInFlight(probs)), plan
        rows = gather_rows(local.tokens, token_ids, ordered=self.deterministic)  # e0 e1 .. is rank-major for sending
        splits, ep = (plan.output_splits, plan.input_splits), self.ep_group
        moving = start_all_to_all_rows(rows, *splits, group=ep, what="dispatch rows", payload=self.payload)
        return InTransit(moving, start_all_to_all_rows(probs, *splits, group=ep, what="dispatch probs")), plan

    def dispatch_postprocess(self, in_transit: InTransit, plan: AlltoAllPlan) -> tuple[ExpertInput, AlltoAllPlan]:
        """Receive, share with the ranks of the same experts, and sort by expert: -> [R, H]."""
        rows, probs = in_transit.rows.wait(), in_transit.probs.wait()
        row_ids, per_source = plan.token_ids, plan.tokens_per_source
        if self._has_row_per_slot:
            if self.etp_group.size > 1:
                gathering = start_all_gather_rows(
                    rows, plan.etp_sizes, group=self.etp_group, what="dispatch rows", payload=self.payload
                )
                probs = all_gather_rows(probs, plan.etp_sizes, group=self.etp_group, what="dispatch probs")
                rows = gathering.wait()  # -> [R, H]
            # r0e0 r0e1 | r1e0 r1e1 (as they arrive: by etp, ep, expert) -> r0e0 r1e0 | r0e1 r1e1 (by expert, ep, etp)
            arrived = per_source.view(-1, self.ep_group.size, self.etp_group.size).permute(2, 1, 0)  # [etp, ep, L]
            blocks = torch.arange(arrived.numel(), device=rows.device).view(arrived.shape).permute(2, 1, 0)
            row_ids = reorder_blocks(arrived.reshape(-1), blocks.reshape(-1), sum(plan.etp_sizes))
            probs = probs.index_select(0, row_ids)
        counts, count_list = per_source.sum(1), plan.tokens_per_expert_list
        return ExpertInput.padded(rows, row_ids, probs, counts, count_list, self.pad_multiple, per_source), plan

    def token_combine(self, rows: Tensor, plan: AlltoAllPlan) -> RowsInFlight:
        """Send every row back: [R, H] -> [rows sent, H]; on one rank [T, H] as it is."""
        if not self._has_row_per_slot:
            return RowsInFlight(rows)
        if self.etp_group.size > 1:
            rows = reduce_scatter_rows(rows, plan.etp_sizes, group=self.etp_group, what="combine rows")
        splits = (plan.input_splits, plan.output_splits)
        return start_all_to_all_rows(rows, *splits, group=self.ep_group, what="combine rows")

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: AlltoAllPlan) -> Tensor:
        """Add up the rows of each token: [rows sent, H] -> hidden_shape."""
        rows = returning.wait()
        if self._has_row_per_slot:
            num_tokens = torch.Size(plan.hidden_shape[:-1]).numel()
            rows = sum_rows(rows, plan.token_ids, num_tokens, ordered=self.deterministic)  # -> [T, H]
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])

    @property
    def _has_row_per_slot(self) -> bool:
        """Whether rows are copies, one per (token, expert) pair, and not the tokens themselves."""
        return self.moves or self.deterministic
