"""The deduplicated dispatcher: a token crosses to a rank once, however many of its experts live there."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispatchers.base import Counts, DispatcherGroups, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.collectives import (
    Payload,
    RankGroup,
    RowsInFlight,
    SumInFlight,
    all_to_all_rows,
    start_all_to_all_rows,
)
from dispatchers.config import DispatcherConfig
from dispatchers.permutation import gather_rows, routed_slots, slot_probs, sum_rows

MAX_EXPERTS_OF_A_TARGET = 1 << 15  # expert ids travel as int16


@dataclass(frozen=True)
class Splits:
    """Rows and slots that this rank exchanges with each rank of the group.

    Attributes:
        rows_to, rows_from: rows sent to and received from each rank.
        slots_to, slots_from: (row, expert) pairs likewise.
    """

    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    slots_to: tuple[int, ...]
    slots_from: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor, slots: Tensor, rank: int) -> Splits:
        """Read them from tables [n, n] int64 on the host, from rank (line) to rank (column)."""
        lines = (rows[rank], rows[:, rank], slots[rank], slots[:, rank])
        return cls(*(tuple(line.tolist()) for line in lines))


@dataclass(frozen=True)
class Hop:
    """One exchange that has been made, for the way back.

    Attributes:
        row_ids: [rows sent] int64, which row each row sent is a copy of.
        num_rows: rows before the exchange.
        splits: who got what.
    """

    row_ids: Tensor
    num_rows: int
    splits: Splits


@dataclass(frozen=True)
class DeduplicatedPlan:
    """What the later stages need to know.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        hops: the exchanges made so far, in order; empty on one rank.
        inside_node: the exchange that `dispatch_postprocess` has still to make; None without a second level.
        tokens_per_expert: [L] int64, slots of each local expert.
        tokens_per_expert_list: the same on the host.
        routing_map: [T, E] on one rank, where nothing travels; else None.
    """

    hidden_shape: tuple[int, ...]
    hops: tuple[Hop, ...]
    inside_node: Splits | None
    tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...]
    routing_map: Tensor | None = None


class MoEDeduplicatedTokenDispatcher(TokenDispatcher[DeduplicatedPlan]):
    """Dispatch each token once to each rank that holds one of its experts, with their ids and probs; combine likewise.

    The receiving rank reads the row once per local expert and adds their results up before one row travels back. Ranks
    of an expert-tensor group each get the row, and their addends are summed at home: no exchange over etp is needed.

    With moe_dispatch_node_size a token crosses to a node once, to the rank there with the place of its own rank, which
    passes it on inside the node and adds up what comes back. Nodes are consecutive ranks of the tp_ep group.

    Rows are packed as moe_dispatch_dtype says; passing a packed row on changes no value.

    Collectives: dispatch: all_gather of [E + ep (+ nodes)] int64 over tp_ep; all_to_all over tp_ep of rows [*, H], of
        probs [*] and of expert ids, 2 bytes each; with nodes these three twice. combine: all_to_all of rows over tp_ep,
        twice with nodes. Backward runs the mirror image. One device-to-host copy per dispatch, none elsewhere. The
        exchange inside a node is not overlapped.

    Saved for backward: int64 indices, 16 bytes per row sent and 32 per slot sent or held.

    Source: DeepEP's normal kernels (github.com/deepseek-ai/DeepEP) move the same rows; DeepSeek-V3, arXiv:2412.19437,
        section 3.2.2, for the two levels.

    Raises:
        ValueError: a node size that does not divide the ranks, or that splits an expert-tensor group.
    """

    def __init__(
        self, config: DispatcherConfig, groups: DispatcherGroups | None = None, *, pad_multiple: int = 1
    ) -> None:
        super().__init__(config, groups, pad_multiple=pad_multiple)
        num_ranks, etp_size = self.tp_ep_group.size, self.etp_group.size
        node_size = config.moe_dispatch_node_size
        if node_size is not None and self.moves and (num_ranks % node_size or node_size % etp_size):
            fitting = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and n % etp_size == 0]
            raise ValueError(
                f"moe_dispatch_node_size ({node_size}) must divide the ranks of expert and expert-tensor parallelism"
                f" ({num_ranks}) and be a multiple of the expert-tensor-parallel size ({etp_size}); sizes that fit:"
                f" {fitting}."
            )
        self.node_size = num_ranks if node_size is None or not self.moves else node_size
        self.num_nodes = num_ranks // self.node_size
        if self.num_experts // self.num_nodes > MAX_EXPERTS_OF_A_TARGET:
            raise ValueError(
                f"num_moe_experts ({self.num_experts}) is more than {MAX_EXPERTS_OF_A_TARGET} on a rank or node; expert"
                " ids travel as int16."
            )

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return [E + ep + nodes] int64: slots of each expert, tokens for each expert-parallel rank, for each node."""
        ranks = _reached(routing_map, self.ep_group.size)  # [T, ep]
        nodes = ranks if self.num_nodes == self.ep_group.size else _reached(ranks, self.num_nodes)  # [T, nodes]
        return torch.cat([super().counts_of(routing_map), ranks.sum(0), nodes.sum(0)])

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, DeduplicatedPlan]:
        """Send each token to each rank (or node) that needs it: [T, H] -> [rows received, H]."""
        first = self.ep_group.rank * self.num_local_experts
        here = slice(first, first + self.num_local_experts)
        slots_here = counts.device[:, here].sum(0), tuple(counts.host[:, here].sum(0).tolist())
        if not self.moves:
            plan = DeduplicatedPlan(local.hidden_shape, (), None, *slots_here, local.routing_map)
            return InTransit(RowsInFlight(local.tokens), RowsInFlight(local.probs)), plan
        whole_way, to_nodes, inside_node = self._splits(counts.host)
        one_level = self.num_nodes == 1
        copies, splits = (self.etp_group.size, whole_way) if one_level else (1, to_nodes)
        in_transit, hop = _start_hop(local, self._num_targets, copies, splits, self.tp_ep_group, self.payload)
        return in_transit, DeduplicatedPlan(local.hidden_shape, (hop,), None if one_level else inside_node, *slots_here)

    def dispatch_postprocess(
        self, in_transit: InTransit, plan: DeduplicatedPlan
    ) -> tuple[ExpertInput, DeduplicatedPlan]:
        """Receive, pass on inside the node, and list the slots by expert: -> [R, H]."""
        if plan.routing_map is not None:
            rows, probs, routing_map = in_transit.rows.wait(), in_transit.probs.wait(), plan.routing_map
        else:
            rows, probs, routing_map = _receive(in_transit, self.num_experts // self._num_targets)
        if plan.inside_node is not None:
            arrived = LocalTokens(rows, probs, routing_map, routing_map, tuple(rows.shape))
            targets, copies = self.node_size // self.etp_group.size, self.etp_group.size
            onward, hop = _start_hop(arrived, targets, copies, plan.inside_node, self.tp_ep_group, self.payload)
            rows, probs, routing_map = _receive(onward, self.num_local_experts)
            plan = replace(plan, hops=(*plan.hops, hop))
        row_ids, expert_ids = routed_slots(routing_map, sum(plan.tokens_per_expert_list))
        weights = slot_probs(probs, row_ids, expert_ids)  # [M]
        counts = plan.tokens_per_expert, plan.tokens_per_expert_list
        return ExpertInput.padded(rows, row_ids, weights, *counts, self.pad_multiple), plan

    def token_combine(self, rows: Tensor, plan: DeduplicatedPlan) -> RowsInFlight:
        """Send one row back for each that came: [R, H] -> [rows sent, H]; on one rank [T, H] as it is."""
        for hop in reversed(plan.hops[1:]):
            splits = hop.splits
            back = all_to_all_rows(rows, splits.rows_to, splits.rows_from, group=self.tp_ep_group, what="combine rows")
            rows = sum_rows(back, hop.row_ids, hop.num_rows)  # the node's addends of each row
        if not plan.hops:
            return RowsInFlight(rows)
        splits = plan.hops[0].splits
        return start_all_to_all_rows(
            rows, splits.rows_to, splits.rows_from, group=self.tp_ep_group, what="combine rows"
        )

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: DeduplicatedPlan) -> Tensor:
        """Add up the rows of each token: [rows sent, H] -> hidden_shape."""
        rows = returning.wait()
        for hop in plan.hops[:1]:
            rows = sum_rows(rows, hop.row_ids, hop.num_rows)  # -> [T, H]
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])

    @property
    def _num_targets(self) -> int:
        """Blocks of experts between which the first exchange tells rows apart."""
        return self.ep_group.size if self.num_nodes == 1 else self.num_nodes

    def _splits(self, counts: Tensor) -> tuple[Splits, Splits, Splits]:
        """Return the splits of the direct way, of the way to the nodes, and of the way on inside a node.

        counts: [n, E + ep + nodes] int64 on the host, what each rank of tp_ep has for each expert, rank and node.
        """
        num_ranks, node_size, nodes = self.tp_ep_group.size, self.node_size, self.num_nodes
        ep_size, etp_size, rank = self.ep_group.size, self.etp_group.size, self.tp_ep_group.rank
        slots, rows, node_rows = counts.split([self.num_experts, ep_size, nodes], dim=1)
        slots_for = slots.view(num_ranks, ep_size, -1).sum(-1).repeat_interleave(etp_size, 1)  # [n, n], from, to
        rows_for = rows.repeat_interleave(etp_size, 1)  # [n, n]
        ranks = torch.arange(num_ranks)
        node, place = ranks // node_size, ranks % node_size
        same_place, same_node = place.unsqueeze(1) == place, node.unsqueeze(1) == node  # [n, n]
        to_nodes = node_rows.repeat_interleave(node_size, 1) * same_place
        node_slots = slots.view(num_ranks, nodes, -1).sum(-1).repeat_interleave(node_size, 1) * same_place
        passed_rows = (same_place.long() @ rows_for) * same_node  # what the ranks of one place have for each rank
        passed_slots = (same_place.long() @ slots_for) * same_node
        return (
            Splits.of(rows_for, slots_for, rank),
            Splits.of(to_nodes, node_slots, rank),
            Splits.of(passed_rows, passed_slots, rank),
        )

    def extra_repr(self) -> str:
        """Show the groups' sizes when the module is printed."""
        return f"{super().extra_repr()}, nodes={self.num_nodes}"


def _reached(routing_map: Tensor, num_targets: int) -> Tensor:
    """Return which tokens have an expert at each target: [T, E] bool -> [T, num_targets] bool."""
    blocks = routing_map.view(routing_map.shape[0], num_targets, routing_map.shape[1] // num_targets)
    return blocks.sum(-1, dtype=torch.int32) > 0  # on a CPU several times as fast as any()


def _start_hop(
    tokens: LocalTokens, num_targets: int, num_copies: int, splits: Splits, group: RankGroup, payload: Payload
) -> tuple[InTransit, Hop]:
    """Send each row once to each target that holds one of its experts, with their ids and probs.

    Example: 2 targets with 2 experts each, a row routed to e0 e1 e3 goes to both, with the ids -1 1 | -2: an id counts
    from the target's first expert, and the first of a row is written as -1 - id.

    Args:
        tokens: rows [R, H], probs [R, E'], routing_map [R, E'], E' the experts of all targets.
        num_targets: blocks of E' / num_targets experts each.
        num_copies: consecutive ranks of the group that hold the same block.
        splits: what the counts say.
        group: the ranks that exchange.
        payload: how rows cross.
    """
    num_rows, num_experts = tokens.routing_map.shape
    width = num_experts // num_targets
    blocks = tokens.routing_map.view(num_rows, num_targets, width).transpose(0, 1)  # [targets, R, width]
    blocks = blocks.unsqueeze(1).expand(-1, num_copies, -1, -1)  # [targets, copies, R, width]
    reached = torch.nonzero_static(blocks.any(-1), size=sum(splits.rows_to))  # by target, copy, row
    row_ids = reached[:, 2].contiguous()  # [rows sent]
    target, copy, row, expert = torch.nonzero_static(blocks.contiguous(), size=sum(splits.slots_to)).unbind(1)
    place = (target * num_copies + copy) * num_rows + row  # [slots sent], grows from row to row
    is_first = torch.ones_like(place, dtype=torch.bool)
    is_first[1:] = place[1:] != place[:-1]
    ids = (
        torch.where(is_first, -1 - expert, expert).to(torch.int16).view(torch.uint8).view(-1, 2)
    )  # backends know bytes
    probs = slot_probs(tokens.probs, row, target * width + expert)  # [slots sent]
    rows = gather_rows(tokens.tokens, row_ids)  # [rows sent, H]
    by_slot = (splits.slots_from, splits.slots_to)
    in_transit = InTransit(
        ids=start_all_to_all_rows(ids, *by_slot, group=group, what="dispatch ids"),
        probs=start_all_to_all_rows(probs, *by_slot, group=group, what="dispatch probs"),
        rows=start_all_to_all_rows(
            rows, splits.rows_from, splits.rows_to, group=group, what="dispatch rows", payload=payload
        ),
    )
    return in_transit, Hop(row_ids, num_rows, splits)


def _receive(in_transit: InTransit, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, H], their probs [R, width] and routing map [R, width] over the experts here."""
    if in_transit.ids is None:
        raise TypeError("ids (None) must be under way with the rows.")
    ids = in_transit.ids.wait().reshape(-1).view(torch.int16).long()  # [slots]
    is_first = ids < 0
    row = is_first.cumsum(0) - 1  # [slots], the row of each slot
    flat = row * width + torch.where(is_first, -1 - ids, ids)
    weights, rows = in_transit.probs.wait(), in_transit.rows.wait()
    probs = weights.new_zeros(rows.shape[0] * width).scatter(0, flat, weights)
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter_(0, flat, True)
    shape = (rows.shape[0], width)
    return rows, probs.view(shape), routing_map.view(shape)
