"""The all-to-all dispatcher: each (token, expert) pair is a row that travels to the expert's rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispatchers.base import ExpertInput, LocalTokens, ReceivedRows, TokenDispatcher
from dispatchers.collectives import all_gather_counts, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from dispatchers.permutation import chunk_row_ids, gather_rows, pad_slots, routed_slots, slot_probs, sum_rows


@dataclass(frozen=True)
class AlltoAllPlan:
    """What combine needs to undo a dispatch.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        token_ids: [rows sent] int64, the local token of each row sent; sorted by expert.
        input_splits: rows sent to each expert-parallel rank.
        output_splits: rows received from each expert-parallel rank.
        etp_sizes: rows that each expert-tensor-parallel rank received.
    """

    hidden_shape: tuple[int, ...]
    token_ids: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    etp_sizes: tuple[int, ...]


class MoEAlltoAllTokenDispatcher(TokenDispatcher[AlltoAllPlan]):
    """Dispatch by all-to-all over EP and all-gather over ETP; combine by reduce-scatter and all-to-all.

    On one rank (EP = ETP = 1) nothing moves and nothing is copied: R = T, and the slots read the tokens by index.
    Otherwise each slot is a row of its own: R = M before padding.

    Collectives: dispatch: all_gather of [E] int64 over tp_ep; all_to_all of rows [*, H] and of probs [*] over ep;
        all_gather (as all_to_all) of both over etp. combine: reduce_scatter (as all_to_all) over etp, all_to_all over
        ep, rows alone. Backward runs the mirror image. One device-to-host copy (the counts) per dispatch, none in
        combine or backward.

    Saved for backward: int64 indices alone. One rank: 8 bytes per slot. More ranks: 16 per row sent and 8 per row held.
        Slot padding: 8 more per slot held.

    Source: Megatron-Core token_dispatcher, class of the same name.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> LocalTokens:
        """Flatten the tokens and count them by expert: hidden_states [..., H], probs [T, E], routing_map [T, E]."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [..., H] -> [T, H]
        num_experts = self.num_local_experts * self.ep_group.size()
        for name, tensor in (("probs", probs), ("routing_map", routing_map)):
            if tensor.shape != (tokens.shape[0], num_experts):
                raise ValueError(
                    f"{name} ({list(tensor.shape)}) must have the shape [tokens, experts] ="
                    f" [{tokens.shape[0]}, {num_experts}]."
                )
        return LocalTokens(tokens, probs, routing_map, routing_map.sum(0), tuple(hidden_states.shape))

    def token_dispatch(self, local: LocalTokens) -> tuple[ReceivedRows, AlltoAllPlan]:
        """Send each routed token to the ranks of its experts: [T, H] -> [R, H]."""
        ep_size, etp_size, num_local = self.ep_group.size(), self.etp_group.size(), self.num_local_experts
        ep_rank, etp_rank = self.ep_group.rank(), self.etp_group.rank()
        counts = all_gather_counts(local.tokens_per_expert, group=self.tp_ep_group)  # [E] -> [ep * etp, E]
        counts = counts.view(ep_size, etp_size, ep_size, num_local)  # source ep, source etp, expert's rank, expert
        counts_cpu = counts.cpu()  # sync: the sizes of every buffer that follows
        here, here_cpu = counts[:, :, ep_rank], counts_cpu[:, :, ep_rank]  # [ep, etp, L], rows that come here
        plan_splits = (
            tuple(counts_cpu[ep_rank, etp_rank].sum(-1).tolist()),
            tuple(here_cpu[:, etp_rank].sum(-1).tolist()),
            tuple(here_cpu.sum((0, 2)).tolist()),
        )
        input_splits, output_splits, etp_sizes = plan_splits
        token_ids, expert_ids = routed_slots(local.routing_map, sum(input_splits))
        rows, probs = local.tokens, slot_probs(local.probs, token_ids, expert_ids)  # [T, H], [rows sent]
        row_ids = token_ids
        if self.tp_ep_group.size() > 1:
            rows = gather_rows(rows, token_ids)  # [T, H] -> [rows sent, H], e0 e1 .. by expert: rank-major for sending
            ep, etp, check = self.ep_group, self.etp_group, self.check_collectives
            rows = all_to_all_rows(rows, output_splits, input_splits, group=ep, check=check)  # -> [rows received, H]
            probs = all_to_all_rows(probs, output_splits, input_splits, group=ep, check=check)
            if etp_size > 1:
                rows = all_gather_rows(rows, etp_sizes, group=etp, check=check)  # -> [R, H]
                probs = all_gather_rows(probs, etp_sizes, group=etp, check=check)
            arrived = here.transpose(0, 1).reshape(etp_size * ep_size, num_local)  # chunks in the order of arrival
            row_ids = chunk_row_ids(arrived, sum(etp_sizes))
            probs = probs.index_select(0, row_ids)
        received = ReceivedRows(rows, probs, row_ids, here.sum((0, 1)), tuple(here_cpu.sum((0, 1)).tolist()))
        return received, AlltoAllPlan(local.hidden_shape, token_ids, *plan_splits)

    def dispatch_postprocess(self, received: ReceivedRows) -> ExpertInput:
        """Append padding slots where a multiple is asked for."""
        counts, count_list = received.tokens_per_expert, received.tokens_per_expert_list
        row_ids, probs = received.row_ids, received.probs
        padded_list = tuple(count + -count % self.pad_multiple for count in count_list)
        if padded_list != count_list:
            padded = counts + -counts % self.pad_multiple
            row_ids, probs = pad_slots(row_ids, probs, counts, padded, sum(padded_list))
            counts = padded
        num_padding_slots = sum(padded_list) - sum(count_list)
        return ExpertInput(received.rows, row_ids, probs, counts, padded_list, num_padding_slots)

    def combine_preprocess(self, expert_output: Tensor, plan: AlltoAllPlan) -> Tensor:
        """Experts have already added up the slots of each row: [R, H] as it is."""
        return expert_output

    def token_combine(self, rows: Tensor, plan: AlltoAllPlan) -> Tensor:
        """Send every row back: [R, H] -> [rows sent, H]; on one rank [T, H] as it is."""
        if self.etp_group.size() > 1:
            rows = reduce_scatter_rows(rows, plan.etp_sizes, group=self.etp_group, check=self.check_collectives)
        return (
            all_to_all_rows(
                rows, plan.input_splits, plan.output_splits, group=self.ep_group, check=self.check_collectives
            )
            if self.tp_ep_group.size() > 1
            else rows
        )

    def combine_postprocess(self, rows: Tensor, plan: AlltoAllPlan) -> Tensor:
        """Add up the rows of each token: [rows sent, H] -> hidden_shape."""
        if self.tp_ep_group.size() > 1:
            rows = sum_rows(rows, plan.token_ids, torch.Size(plan.hidden_shape[:-1]).numel())  # -> [T, H]
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])
