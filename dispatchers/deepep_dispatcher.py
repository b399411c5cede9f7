"""Dispatchers whose transfers are those of the library DeepEP (module deep_ep): its Buffer and its HybridEPBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import deep_ep
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dispatchers.base import Counts, DispatcherGroups, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.collectives import RankGroup, RowsInFlight, SumInFlight
from dispatchers.config import DispatcherConfig
from dispatchers.permutation import routed_slots, slot_probs

HYBRIDEP_TOKENS = 64  # HybridEP's kernels work on chunks of so many tokens
# Options with which a token may get more experts than moe_router_topk says, and their values that do so.
UNBOUNDED_OPTIONS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("moe_router_padding_for_quantization", (True,)),
    ("moe_token_rounding_policy", ("nearest", "up")),
    ("moe_router_type", ("expert_choice",)),
)


class Exchange(Protocol):
    """One dispatch and all that follows from it, over one buffer of the library: its handle says who sent what."""

    def first(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows and weights to the experts' ranks, and learn the handle."""

    def again(self, rows: Tensor) -> Tensor:
        """Send rows the same way, with the handle."""

    def back(self, rows: Tensor, weights: Tensor | None, what: str) -> tuple[Tensor, Tensor | None]:
        """Send rows, and weights if given, back and add up each token's."""


@dataclass(frozen=True)
class DeepEPPlan:
    """What the later stages need to know.

    Attributes:
        hidden_shape: shape of hidden_states, [..., H].
        tokens_per_expert_list: slots of each local expert, on the host.
        tokens_per_expert: [L] int64, the same.
        exchange: the way there, which the way back mirrors; None on one rank.
        routing_map: [T, E] on one rank, where nothing travels; else None.
    """

    hidden_shape: tuple[int, ...]
    tokens_per_expert_list: tuple[int, ...]
    tokens_per_expert: Tensor
    exchange: Exchange | None = None
    routing_map: Tensor | None = None


class MoEDeepEPTokenDispatcher(TokenDispatcher[DeepEPPlan]):
    """Dispatch each token once to each rank that holds one of its experts, by DeepEP's Buffer; combine likewise.

    The library takes rows of bfloat16 whose bytes are a multiple of 16, on CUDA, and weights in fp32. It may come with
    K up to 32. On one rank nothing moves, and the library is not called.

    The buffer is made at the first dispatch, by all ranks together, and replaced where a longer row needs a larger one.
    The dispatcher owns it: neither pickle nor, after the first dispatch, deepcopy works.

    Collectives: dispatch: the library's dispatch over ep. combine: its combine. Backward of dispatch is combine, that
        of combine is dispatch with the same handle. Nothing else: no counts travel beforehand. One host sync, in which
        the library waits for the counts of what arrives. Transfers are not overlapped.

    Counted: calls alone, with 0 rows and 0 bytes: how many rows go to each rank is known on the device only.

    Saved for backward: int64 indices, 8 * (2 K + 1) bytes per row held and 24 per slot held; the library's handle.

    Source: DeepEP (github.com/deepseek-ai/DeepEP), normal kernels; Megatron-Core's flex dispatcher calls it so too.

    Raises:
        ValueError: expert-tensor parallelism; options with which a token may get more than K experts; params_dtype
            other than bfloat16, or moe_check_collectives, with more than one rank.
    """

    def __init__(
        self, config: DispatcherConfig, groups: DispatcherGroups | None = None, *, pad_multiple: int = 1
    ) -> None:
        super().__init__(config, groups, pad_multiple=pad_multiple)
        _check(config, self.ep_group, self.etp_group)
        for name, values in UNBOUNDED_OPTIONS:
            if (value := getattr(config, name, None)) in values:
                raise ValueError(
                    f"{name} ({value!r}) may route a token to more experts than moe_router_topk, which"
                    " moe_flex_dispatcher_backend 'deepep' cannot send; leave it out, or choose 'deduplicated' or"
                    " 'alltoall'."
                )
        self.topk = min(self.num_experts, getattr(config, "moe_router_topk", self.num_experts))
        self.library_buffer: Any = None  # made at the first dispatch

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return no counts: the library tells them. On one rank column sums [E] int64."""
        return routing_map.new_empty(0, dtype=torch.int64) if self.moves else super().counts_of(routing_map)

    def gather_counts(self, counts: Sequence[Tensor]) -> list[Counts]:
        """Nothing needs to be told. On one rank one host sync."""
        return [Counts(each, each) for each in counts] if self.moves else super().gather_counts(counts)

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, DeepEPPlan]:
        """Send each token to the ranks of its experts: [T, H] -> [R, H]."""
        if not self.moves:
            return _stay(local, counts)
        topk_idx, weights = _as_topk(local.routing_map, local.probs, self.topk)  # [T, K], [T, K]
        rows = local.tokens.contiguous()
        exchange = _BufferExchange(self._buffer_for(rows), topk_idx, self.num_experts, self.ep_group)
        rows, weights = _Dispatch.apply(rows, weights, exchange)  # -> [R, H], [R, K]
        in_transit = InTransit(RowsInFlight(rows), RowsInFlight(weights), RowsInFlight(exchange.ids))
        per_expert = _one_hot(exchange.ids, self.num_local_experts).sum(0)  # [R, K] -> [L]
        return in_transit, DeepEPPlan(local.hidden_shape, exchange.count_list, per_expert, exchange)

    def dispatch_postprocess(self, in_transit: InTransit, plan: DeepEPPlan) -> tuple[ExpertInput, DeepEPPlan]:
        """List the slots by expert, then row: -> [R, H]."""
        rows, probs = in_transit.rows.wait(), in_transit.probs.wait()
        if in_transit.ids is None:
            return _stayed(rows, probs, plan, self.pad_multiple), plan
        ids = in_transit.ids.wait()
        routing_map = _one_hot(ids, self.num_local_experts)  # [R, K] -> [R, L]
        empty = probs.new_zeros(rows.shape[0], self.num_local_experts + 1)
        probs = empty.scatter(1, _places(ids, self.num_local_experts), probs)  # [R, K] -> [R, L + 1]
        row_ids, expert_ids = routed_slots(routing_map, sum(plan.tokens_per_expert_list))
        weights = slot_probs(probs, row_ids, expert_ids)  # [M]
        counts = plan.tokens_per_expert, plan.tokens_per_expert_list
        return ExpertInput.padded(rows, row_ids, weights, *counts, self.pad_multiple), plan

    def token_combine(self, rows: Tensor, plan: DeepEPPlan) -> RowsInFlight:
        """Send one row back for each that came, added up on arrival: [R, H] -> [T, H]."""
        return RowsInFlight(rows if plan.exchange is None else _Combine.apply(rows, plan.exchange))

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: DeepEPPlan) -> Tensor:
        """Restore the shape: [T, H] -> hidden_shape."""
        rows = returning.wait()
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])

    def _buffer_for(self, rows: Tensor) -> Any:
        """Return the buffer, large enough for rows [T, H]; all ranks have the same H."""
        hidden_bytes, num_ranks = rows.shape[1] * max(rows.itemsize, 2), self.ep_group.size
        configs = (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks))
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
        held = self.library_buffer
        if held is None or held.num_nvl_bytes < nvl_bytes or held.num_rdma_bytes < rdma_bytes:
            self.library_buffer = deep_ep.Buffer(self.ep_group.group, nvl_bytes, rdma_bytes)
        return self.library_buffer

    def extra_repr(self) -> str:
        """Show the groups' sizes and K when the module is printed."""
        return f"{super().extra_repr()}, topk={self.topk}"


class MoEHybridEPTokenDispatcher(TokenDispatcher[DeepEPPlan]):
    """Dispatch by DeepEP's HybridEPBuffer, which also sorts rows by expert; each slot is a row: R = M before padding.

    The library takes rows of bfloat16 on CUDA, probs in fp32, and the same number of tokens on every rank. So ranks
    tell each other how many they have, and tokens routed nowhere fill up to the most, a multiple of 64. The map goes as
    it is: a token may have any number of experts. On one rank nothing moves, and the library is not called.

    The buffer is made at the first dispatch, by all ranks together, and replaced where more tokens or longer rows need
    a larger one. The dispatcher owns it: neither pickle nor, after the first dispatch, deepcopy works.

    Collectives: dispatch: all_gather of [1] int64 over tp_ep with one host sync, then the library's dispatch over ep,
        with another (the sizes of what arrives). combine: its combine. Backward of dispatch is combine, that of combine
        is dispatch with the same handle; neither syncs. Transfers are not overlapped.

    Counted: the all_gather in full; of the library calls alone, with 0 rows and 0 bytes.

    Saved for backward: the library's handle; with slot padding 8 bytes per slot held.

    Source: DeepEP (github.com/deepseek-ai/DeepEP), branch hybrid-ep; Megatron-Core's flex dispatcher calls it so too.

    Raises:
        ImportError: a deep_ep without HybridEPBuffer.
        ValueError: expert-tensor parallelism; params_dtype other than bfloat16, or moe_check_collectives, with more
            than one rank.
    """

    def __init__(
        self, config: DispatcherConfig, groups: DispatcherGroups | None = None, *, pad_multiple: int = 1
    ) -> None:
        super().__init__(config, groups, pad_multiple=pad_multiple)
        _check(config, self.ep_group, self.etp_group)
        if not hasattr(deep_ep, "HybridEPBuffer"):
            raise ImportError(
                "moe_flex_dispatcher_backend ('hybridep') needs deep_ep.HybridEPBuffer, which this deep_ep lacks;"
                " install the branch hybrid-ep of github.com/deepseek-ai/DeepEP, or choose 'deduplicated', which needs"
                " nothing."
            )
        self.library_buffer: Any = None  # made at the first dispatch

    def counts_of(self, routing_map: Tensor) -> Tensor:
        """Return the number of tokens, [1] int64. On one rank column sums [E] int64."""
        if not self.moves:
            return super().counts_of(routing_map)
        return torch.full((1,), routing_map.shape[0], dtype=torch.int64, device=routing_map.device)

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, DeepEPPlan]:
        """Send each token to its experts: [T, H] -> [M, H], expert-major."""
        if not self.moves:
            return _stay(local, counts)
        most = max(int(counts.host.max()), 1)
        most += -most % HYBRIDEP_TOKENS
        fill = (0, 0, 0, most - local.tokens.shape[0])
        rows, probs = F.pad(local.tokens, fill), F.pad(local.probs.float(), fill)  # [T, ..] -> [most, ..]
        routing_map = F.pad(local.routing_map, fill).contiguous()
        exchange = _HybridExchange(self._buffer_for(rows), routing_map, self.num_local_experts, self.ep_group)
        rows, weights = _Dispatch.apply(rows.contiguous(), probs.contiguous(), exchange)  # -> [M, H], [M]
        plan = DeepEPPlan(local.hidden_shape, exchange.count_list, exchange.tokens_per_expert, exchange)
        return InTransit(RowsInFlight(rows), RowsInFlight(weights)), plan

    def dispatch_postprocess(self, in_transit: InTransit, plan: DeepEPPlan) -> tuple[ExpertInput, DeepEPPlan]:
        """Number the slots, which lie as experts want them: -> [M, H]."""
        rows, probs = in_transit.rows.wait(), in_transit.probs.wait()
        if plan.exchange is None:
            return _stayed(rows, probs, plan, self.pad_multiple), plan
        row_ids = torch.arange(rows.shape[0], device=rows.device)
        counts = plan.tokens_per_expert, plan.tokens_per_expert_list
        return ExpertInput.padded(rows, row_ids, probs, *counts, self.pad_multiple), plan

    def token_combine(self, rows: Tensor, plan: DeepEPPlan) -> RowsInFlight:
        """Send every row back, added up on arrival: [M, H] -> [T or more, H]; on one rank [T, H] as it is."""
        return RowsInFlight(rows if plan.exchange is None else _Combine.apply(rows, plan.exchange))

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: DeepEPPlan) -> Tensor:
        """Leave out what filled up, restore the shape: [T or more, H] -> hidden_shape."""
        rows = returning.wait()[: torch.Size(plan.hidden_shape[:-1]).numel()]
        return rows.view(*plan.hidden_shape[:-1], rows.shape[-1])

    def _buffer_for(self, rows: Tensor) -> Any:
        """Return the buffer, large enough for rows [tokens, H], whose shape is the same on all ranks."""
        held, (num_tokens, hidden_size) = self.library_buffer, rows.shape
        if held is None or held.max_num_of_tokens_per_rank < num_tokens or held.hidden_dim < hidden_size:
            known = (0, 0) if held is None else (held.max_num_of_tokens_per_rank, held.hidden_dim)
            self.library_buffer = deep_ep.HybridEPBuffer(
                group=self.ep_group.group,
                hidden_dim=max(hidden_size, known[1]),
                max_num_of_tokens_per_rank=max(num_tokens, known[0]),
                num_local_experts=self.num_local_experts,
                use_fp8=False,
            )
        return self.library_buffer


class _BufferExchange:
    """An Exchange over a deep_ep.Buffer; topk_idx [T, K] int64, -1 for no expert."""

    def __init__(self, buffer: Any, topk_idx: Tensor, num_experts: int, group: RankGroup) -> None:
        self.buffer, self.topk_idx, self.num_experts, self.group = buffer, topk_idx, num_experts, group
        self.handle: Any = None
        self.count_list: tuple[int, ...] = ()  # slots of each local expert
        self.ids = topk_idx  # what comes with the rows received: [R, K] int64 local experts, -1 for none here

    def first(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H], weights [T, K] fp32 -> [R, H], [R, K]."""
        layout = self.buffer.get_dispatch_layout(self.topk_idx, self.num_experts)
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = layout
        _count("deepep dispatch", self.group, rows)
        received = self.buffer.dispatch(  # sync: the library waits for the counts of what arrives
            rows,
            topk_idx=self.topk_idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        rows, self.ids, weights, counts, self.handle, _ = received
        self.count_list = tuple(counts)
        return rows, weights

    def again(self, rows: Tensor) -> Tensor:
        """Rows [T, H] -> [R, H]."""
        _count("deepep combine backward", self.group, rows)
        return self.buffer.dispatch(rows, handle=self.handle)[0]

    def back(self, rows: Tensor, weights: Tensor | None, what: str) -> tuple[Tensor, Tensor | None]:
        """Rows [R, H], weights [R, K] fp32 -> [T, H], [T, K]."""
        _count(f"deepep {what}", self.group, rows)
        rows, weights, _ = self.buffer.combine(rows, handle=self.handle, topk_weights=weights)
        return rows, weights


class _HybridExchange:
    """An Exchange over a deep_ep.HybridEPBuffer; routing_map [T, E] bool, T the same on all ranks."""

    def __init__(self, buffer: Any, routing_map: Tensor, num_local_experts: int, group: RankGroup) -> None:
        self.buffer, self.routing_map, self.group = buffer, routing_map, group
        self.num_local_experts = num_local_experts
        self.handle: Any = None
        self.count_list: tuple[int, ...] = ()  # slots of each local expert
        self.tokens_per_expert = routing_map.new_zeros(num_local_experts, dtype=torch.int64)

    def first(self, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H], weights [T, E] fp32 -> [M, H], [M], expert-major."""
        _count("hybridep dispatch", self.group, rows)
        sent = {"hidden": rows, "routing_map": self.routing_map, "probs": weights}
        received = self.buffer.dispatch_with_permute(**sent, num_of_experts_per_rank=self.num_local_experts)
        moved, weights, _, counts, self.handle = received
        self.count_list = tuple(counts.tolist())  # sync: unless the library has put the counts on the host
        self.tokens_per_expert = counts.to(rows.device, torch.int64)
        return moved, weights

    def again(self, rows: Tensor) -> Tensor:
        """Rows [T, H] -> [M, H]."""
        _count("hybridep combine backward", self.group, rows)
        num_slots = sum(self.count_list)
        return self.buffer.dispatch_with_permute(hidden=rows, handle=self.handle, num_permuted_tokens=num_slots)[0]

    def back(self, rows: Tensor, weights: Tensor | None, what: str) -> tuple[Tensor, Tensor | None]:
        """Rows [M, H], weights [M] fp32 -> [T, H], [T, E]."""
        _count(f"hybridep {what}", self.group, rows)
        rows, weights = self.buffer.combine_with_unpermute(hidden=rows, probs=weights, handle=self.handle)
        return rows, weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return exchange.first(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        grads = grad_rows.contiguous(), grad_weights.contiguous()
        return *ctx.exchange.back(*grads, "dispatch backward"), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(rows.contiguous(), None, "combine")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.again(grad.contiguous()), None


def _check(config: DispatcherConfig, ep_group: RankGroup, etp_group: RankGroup) -> None:
    """Raise ValueError for what the library cannot do."""
    name = config.dispatcher_name
    if etp_group.size > 1:
        raise ValueError(
            f"The expert-tensor-parallel size ({etp_group.size}) must be 1 with moe_flex_dispatcher_backend {name!r},"
            f" which works over the expert-parallel group ({ep_group.size}) alone; or choose 'deduplicated'."
        )
    if ep_group.size == 1:
        return
    dtype = getattr(config, "params_dtype", torch.bfloat16)
    if dtype != torch.bfloat16:
        raise ValueError(
            f"params_dtype ({dtype}) must be torch.bfloat16 with moe_flex_dispatcher_backend {name!r}, which moves no"
            " other rows; or choose 'deduplicated'."
        )
    if config.moe_check_collectives:
        raise ValueError(
            f"moe_check_collectives (True) cannot look into the transfers of moe_flex_dispatcher_backend {name!r};"
            " leave it out, or choose 'deduplicated'."
        )


def _count(operation: str, group: RankGroup, rows: Tensor) -> None:
    """Count a call of the library that is about to move rows [.., H], without their number."""
    if group.counter is not None:
        row_bytes = rows.itemsize * rows.shape[1]
        group.counter.add_rows(operation, group.name, group.rank, [0] * group.size, row_bytes)


def _as_topk(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their probs: ids [T, K] int64, ascending, then -1; weights [T, K] fp32.

    Example: the map 0 1 0 1 with K = 3 gives the ids 1 3 -1. A map with more than K experts for a token fails, on CUDA
    when the kernel runs; no host sync.
    """
    torch._assert_async((routing_map.sum(1) <= topk).all(), f"A token has more experts than topk ({topk}).")
    is_routed, ids = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    is_routed, ids = is_routed[:, :topk].bool(), ids[:, :topk]  # [T, E] -> [T, K]
    weights = torch.where(is_routed, probs.gather(1, ids).float(), 0.0)
    return torch.where(is_routed, ids, -1).contiguous(), weights.contiguous()


def _places(ids: Tensor, width: int) -> Tensor:
    """Return ids [R, K] with `width` for -1."""
    return torch.where(ids < 0, width, ids)


def _one_hot(ids: Tensor, width: int) -> Tensor:
    """Return the routing map of ids [R, K], -1 for none: [R, width] bool."""
    routing_map = torch.zeros(ids.shape[0], width + 1, dtype=torch.bool, device=ids.device)
    return routing_map.scatter_(1, _places(ids, width), True)[:, :width]


def _stay(local: LocalTokens, counts: Counts) -> tuple[InTransit, DeepEPPlan]:
    """Move nothing: tokens [T, H] of one rank, counts [1, E]."""
    count_list = tuple(counts.host[0].tolist())
    plan = DeepEPPlan(local.hidden_shape, count_list, counts.device[0], routing_map=local.routing_map)
    return InTransit(RowsInFlight(local.tokens), RowsInFlight(local.probs.float())), plan


def _stayed(rows: Tensor, probs: Tensor, plan: DeepEPPlan, pad_multiple: int) -> ExpertInput:
    """List the slots of rows [T, H] that did not move, with probs [T, E]."""
    if plan.routing_map is None:
        raise TypeError("routing_map (None) must be in the plan of one rank.")
    row_ids, expert_ids = routed_slots(plan.routing_map, sum(plan.tokens_per_expert_list))
    counts = plan.tokens_per_expert, plan.tokens_per_expert_list
    return ExpertInput.padded(rows, row_ids, slot_probs(probs, row_ids, expert_ids), *counts, pad_multiple)
