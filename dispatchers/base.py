"""The contract between dispatcher and experts, and the stages that every dispatcher has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dispatchers.accounting import CommunicationCounter
from dispatchers.collectives import RankGroup, RowsInFlight, SumInFlight, all_gather_counts, group_of_one
from dispatchers.config import DispatcherConfig
from dispatchers.permutation import column_counts, pad_slots

# Slots of an expert are a multiple of this in deterministic mode: experts then compute in tiles of one shape, and a
# row's result does not depend on which other rows there are.
DETERMINISTIC_ROWS = 32


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

    @property
    def counter(self) -> CommunicationCounter:
        """Counts what crosses ranks."""


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
        has_padding: False says that no entry of row_ids is -1.
        tokens_per_source: [L, source ranks] int64, slots of each local expert by the rank whose tokens they read, in
            which order they lie; padding comes after them. None where a dispatcher does not tell.
        num_slots_list: slots of each local expert on the host, without padding; None likewise.

    Raises:
        ValueError: counts that do not sum to M.
    """

    tokens: Tensor
    row_ids: Tensor
    probs: Tensor
    tokens_per_expert: Tensor
    tokens_per_expert_list: tuple[int, ...]
    has_padding: bool = False
    tokens_per_source: Tensor | None = None
    num_slots_list: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the sizes, which the host knows."""
        num_slots = sum(self.tokens_per_expert_list)
        if not num_slots == self.row_ids.shape[0] == self.probs.shape[0]:
            raise ValueError(
                f"tokens_per_expert_list sums to {num_slots} slots, but row_ids has {self.row_ids.shape[0]} and probs"
                f" {self.probs.shape[0]}."
            )

    @classmethod
    def padded(
        cls,
        tokens: Tensor,
        row_ids: Tensor,
        probs: Tensor,
        tokens_per_expert: Tensor,
        count_list: tuple[int, ...],
        pad_multiple: int,
        tokens_per_source: Tensor | None = None,
    ) -> ExpertInput:
        """Return the input of experts after slots of every non-empty expert were padded to a multiple.

        Args:
            tokens, row_ids, probs, tokens_per_expert, tokens_per_source: as above, without padding.
            count_list: tokens_per_expert on the host.
            pad_multiple: the multiple; 1 pads nothing.
        """
        padded_list = tuple(count + -count % pad_multiple for count in count_list)
        if padded_list != count_list:
            padded = tokens_per_expert + -tokens_per_expert % pad_multiple
            row_ids, probs = pad_slots(row_ids, probs, tokens_per_expert, padded, sum(padded_list))
            tokens_per_expert = padded
        has_padding = padded_list != count_list
        return cls(tokens, row_ids, probs, tokens_per_expert, padded_list, has_padding, tokens_per_source, count_list)


@dataclass(frozen=True)
class LocalTokens:
    """This rank's tokens before they travel.

    Attributes:
        tokens: [T, H].
        probs: [T, E].
        routing_map: [T, E] bool, True where routed.
        counts: [C] int64, what the other ranks must know about them.
        hidden_shape: the shape that combine restores.
    """

    tokens: Tensor
    probs: Tensor
    routing_map: Tensor
    counts: Tensor
    hidden_shape: tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """The counts of every rank of the tp_ep group.

    Attributes:
        device: [n, C] int64.
        host: the same on the host.
    """

    device: Tensor
    host: Tensor


@dataclass(frozen=True)
class InTransit:
    """Tokens between `token_dispatch` and `dispatch_postprocess`.

    Attributes:
        rows: [.., H] under way.
        probs: [slots] or [.., L] under way.
        ids: what says which experts the rows go to, under way; None if the counts say it all.
    """

    rows: RowsInFlight
    probs: RowsInFlight
    ids: RowsInFlight | None = None


Plan = TypeVar("Plan")


class TokenDispatcher(nn.Module, ABC, Generic[Plan]):
    """Moves tokens to their experts and the results back.

    A dispatcher keeps nothing between calls: what combine needs travels in the plan that dispatch returns, so several
    micro-batches may be in flight and recomputation is safe. `token_dispatch` and `token_combine` start transfers, the
    stages after them wait: whatever is called in between runs while tokens travel, in forward and in backward.

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
        self.ep_group, self.etp_group, self.tp_ep_group = _rank_groups(groups, config.moe_check_collectives)
        num_experts, ep_size = config.num_moe_experts, self.ep_group.size
        if num_experts % ep_size:
            lower = num_experts // ep_size * ep_size
            nearest = [n for n in (lower, lower + ep_size) if n]
            raise ValueError(
                f"num_moe_experts ({num_experts}) must be divisible by the expert-parallel size ({ep_size});"
                f" the nearest such numbers of experts are {nearest}."
            )
        self.num_experts, self.num_local_experts = num_experts, num_experts // ep_size
        self.deterministic = config.moe_deterministic
        self.pad_multiple = math.lcm(pad_multiple, DETERMINISTIC_ROWS) if self.deterministic else pad_multiple
        self.payload = config.dispatch_payload

    @property
    def moves(self) -> bool:
        """Whether there is more than one rank to move tokens between."""
        return self.tp_ep_group.size > 1

    def dispatch(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[ExpertInput, Plan]:
        """Bring every routed token to its experts, in one part.

        Args:
            hidden_states: [..., H], T tokens.
            probs: [T, E], zero where not routed.
            routing_map: [T, E] bool, True where routed.

        Returns:
            The experts' input, and the plan for `combine`.

        Raises:
            ValueError: probs or routing_map of another shape.
        """
        ((in_transit, plan),) = self.start_dispatch(hidden_states, probs, routing_map)
        return self.dispatch_postprocess(in_transit, plan)

    def start_dispatch(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor, num_chunks: int = 1
    ) -> list[tuple[InTransit, Plan]]:
        """Send the tokens off in parts; `dispatch_postprocess` receives each.

        Args:
            hidden_states, probs, routing_map: as in `dispatch`.
            num_chunks: parts of nearly equal size, the same number on every rank.

        Returns:
            num_chunks transfers with their plans. With several, each plan's shape is [T_i, H], tokens in order.

        Raises:
            ValueError: as in `dispatch`.

        Host syncs: one, whatever the number of parts; none where the counts are known.
        """
        if num_chunks == 1:
            chunks = [self.dispatch_preprocess(hidden_states, probs, routing_map)]
        else:
            tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [..., H] -> [T, H]
            sizes = [tokens.shape[0] // num_chunks + (i < tokens.shape[0] % num_chunks) for i in range(num_chunks)]
            self._check_shapes(tokens, probs, routing_map)
            parts = zip(*(tensor.split(sizes) for tensor in (tokens, probs, routing_map)), strict=True)
            chunks = [self.dispatch_preprocess(*part) for part in parts]
        counts = self.gather_counts([chunk.counts for chunk in chunks])
        return [self.token_dispatch(chunk, known) for chunk, known in zip(chunks, counts, strict=True)]

    def start_combine(self, expert_output: Tensor, plan: Plan) -> RowsInFlight | SumInFlight:
        """Send the experts' result off; `combine_postprocess` receives it.

        Args:
            expert_output: [R, H], the experts' result for each row of ExpertInput.tokens.
            plan: what came with the ExpertInput.
        """
        return self.token_combine(self.combine_preprocess(expert_output, plan), plan)

    def combine(self, expert_output: Tensor, plan: Plan) -> Tensor:
        """Bring expert outputs back and add up each token's.

        Args:
            expert_output: [R, H], the experts' result for each row of ExpertInput.tokens.
            plan: what dispatch returned.

        Returns:
            The shape of hidden_states at dispatch.
        """
        return self.combine_postprocess(self.start_combine(expert_output, plan), plan)

    def dispatch_preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> LocalTokens:
        """Flatten and count the tokens: hidden_states [..., H], probs [T, E], routing_map [T, E]."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [..., H] -> [T, H]
        self._check_shapes(tokens, probs, routing_map)
        return LocalTokens(tokens, probs, routing_map, self.counts_of(routing_map), tuple(hidden_states.shape))

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return what the other ranks must know of a map [T, E]: by default its column sums, [E] int64."""
        return column_counts(routing_map)

    def gather_counts(self, counts: Sequence[Tensor]) -> list[Counts]:
        """Tell all ranks of tp_ep the counts [C] of every part. One all_gather and one host sync for all parts."""
        table = all_gather_counts(torch.cat(list(counts)), group=self.tp_ep_group)  # [parts * C] -> [n, parts * C]
        host = table.cpu()  # sync: the sizes of every buffer that follows
        parts = len(counts)
        return [Counts(*both) for both in zip(table.chunk(parts, 1), host.chunk(parts, 1), strict=True)]

    @abstractmethod
    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, Plan]:
        """Start to communicate: [T, H] -> [R, H]."""

    @abstractmethod
    def dispatch_postprocess(self, in_transit: InTransit, plan: Plan) -> tuple[ExpertInput, Plan]:
        """Receive, and do the local work after tokens arrived; returns the plan for the way back."""

    def combine_preprocess(self, expert_output: Tensor, plan: Plan) -> Tensor:
        """Local work before results travel: [R, H] -> [R, H]. Experts have already added up the slots of each row."""
        return expert_output

    @abstractmethod
    def token_combine(self, rows: Tensor, plan: Plan) -> RowsInFlight | SumInFlight:
        """Start to communicate: [R, H] -> rows of this rank's tokens."""

    @abstractmethod
    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: Plan) -> Tensor:
        """Receive, and do the local work after results arrived: to the shape of hidden_states."""

    def _check_shapes(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> None:
        """Raise ValueError unless probs and routing_map are [T, E]; tokens: [T, H]."""
        for name, tensor in (("probs", probs), ("routing_map", routing_map)):
            if tensor.shape != (tokens.shape[0], self.num_experts):
                raise ValueError(
                    f"{name} ({list(tensor.shape)}) must have the shape [tokens, experts] ="
                    f" [{tokens.shape[0]}, {self.num_experts}]."
                )

    def extra_repr(self) -> str:
        """Show the groups' sizes when the module is printed."""
        return (
            f"ep={self.ep_group.size}, etp={self.etp_group.size}, local_experts={self.num_local_experts},"
            f" pad_multiple={self.pad_multiple}, payload={self.payload}, deterministic={self.deterministic}"
        )


def _rank_groups(groups: DispatcherGroups | None, check: bool) -> tuple[RankGroup, RankGroup, RankGroup]:
    """Return ep, etp and tp_ep as the collectives see them."""
    if groups is None:
        alone = RankGroup(group_of_one())
        return alone, alone, alone
    named = (("ep", groups.ep), ("etp", groups.etp), ("tp_ep", groups.tp_ep))
    ep, etp, tp_ep = (RankGroup(group, name, check, groups.counter) for name, group in named)
    return ep, etp, tp_ep
