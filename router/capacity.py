"""How many tokens an expert takes: capacity with dropping, and rounding of counts to a multiple."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the slots of an expert, ceil(num_tokens / num_experts * capacity_factor), at least min_capacity.

    Args:
        num_tokens: token slots over all experts, T * K.
        num_experts: E.
        capacity_factor: 1 is room for a balanced load.
        min_capacity: lower bound, or None.

    Raises:
        ValueError: a factor that is not positive and finite.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2, equation 3; Megatron-Core moe_utils.
    """
    if not 0.0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor ({capacity_factor}) must be a positive, finite number.")
    capacity = math.ceil((num_tokens / num_experts) * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
    *,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Let each expert keep at most its capacity C = ceil(T * K / E * factor) of this rank's tokens.

    A dropped pair has the prob 0; the other weights of its token stay as they are.

    Args:
        routing_probs: [T, E], zero where not routed.
        routing_map: [T, E] bool.
        router_topk: K.
        capacity_factor: see `get_capacity`.
        drop_policy: who stays: "probs" the largest probs (NaN last), "position" the first tokens.
        pad_to_capacity: every expert gets exactly min(C, T) tokens, so that shapes depend on T alone. Added ones are
            the first free tokens, with prob 0: real tokens, whose outputs do not count.
        padding_mask: [T] bool, True = padding, not routed: T is the number of other tokens, so that they have the
            capacity they would have alone. With pad_to_capacity T is all tokens, for the shapes' sake.

    Returns:
        probs and routing_map [T, E] in new storage. No host sync.

    Raises:
        ValueError: an unknown policy, or a factor that is not positive and finite.

    Source: Megatron-Core moe_utils, function of the same name. Differs: "position" keeps the first tokens (there it is
        a top-k over equal values, so any of them); more capacity than tokens is all tokens (there, padded, an error).
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy ({drop_policy!r}) must be 'probs' or 'position'.")
    num_tokens, num_experts = routing_map.shape
    capacity: int | Tensor = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
    if padding_mask is not None and not pad_to_capacity:
        num_valid = padding_mask.logical_not().sum().double()
        capacity = ((num_valid * router_topk / num_experts) * capacity_factor).ceil()
    if drop_policy == "probs":
        place = rank_by_score(routing_probs, routing_map)  # [T, E]
    else:
        place = routing_map.cumsum(0) - 1
    kept = routing_map & (place < capacity)
    probs = torch.where(kept, routing_probs, 0.0)
    if pad_to_capacity:
        free = ~kept
        missing = min(int(capacity), num_tokens) - kept.sum(0)  # [E]
        kept = kept | (free & (free.cumsum(0) <= missing))
    return probs, kept


def apply_token_rounding(
    weights: Tensor,
    routing_map: Tensor,
    multiple: int,
    policy: str = "nearest",
    *,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Round each expert's count of tokens to a multiple by dropping its worst tokens or adding the next best.

    So tiles of the grouped GEMM are full, and no slot is wasted on padding. A token that chose the expert always comes
    before one that did not; among equals weights decide. No other weight changes. An expert without tokens stays so.

    Args:
        weights: [T, E], the weight that each pair has or would have; see `dense_weights`.
        routing_map: [T, E] bool, the tokens' own choice.
        multiple: rows of a tile.
        policy: "nearest" (halves up), "up" or "down".
        padding_mask: [T] bool, True = padding: never added.

    Returns:
        probs and routing_map [T, E] in new storage; every column sum is a multiple, and differs from the choice by less
        than one. Where too few tokens are left to go up, it is the largest multiple there is. No host sync.

    Raises:
        ValueError: an unknown policy, or multiple < 1.

    Source: SonicMoE, arXiv:2512.14080, token rounding: each count goes to a multiple of the tile, chosen tokens first.
    """
    offsets = {"nearest": multiple // 2, "up": multiple - 1, "down": 0}
    if policy not in offsets:
        raise ValueError(f"policy ({policy!r}) must be one of {', '.join(map(repr, offsets))}.")
    if multiple < 1:
        raise ValueError(f"multiple ({multiple}) must be at least 1.")
    counts = routing_map.sum(0)  # [E]
    open_tokens = torch.ones_like(routing_map) if padding_mask is None else ~padding_mask.unsqueeze(-1) & ~routing_map
    open_tokens = open_tokens | routing_map
    most = open_tokens.sum(0) // multiple * multiple
    target = torch.minimum((counts + offsets[policy]) // multiple * multiple, most)
    target = torch.where(counts > 0, target, 0)
    place = rank_by_score(weights, routing_map, open_tokens)
    kept = open_tokens & (place < target)
    return torch.where(kept, weights, 0.0), kept


def rank_by_score(scores: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Return each token's place inside its expert, from 0: larger scores first, of equal ones the lower token.

    Args:
        scores: [T, E]; NaN comes last within its class.
        first: [T, E] bool, pairs that come before all others.
        second: [T, E] bool, pairs that come before the rest; None: all.

    Returns:
        [T, E] int64.
    """
    order = (
        scores.detach()
        .nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        .argsort(dim=0, descending=True, stable=True)
    )  # [T, E] token ids, best first
    classes = torch.where(first, 0, 1) if second is None else torch.where(first, 0, torch.where(second, 1, 2))
    order = order.gather(0, classes.gather(0, order).argsort(dim=0, stable=True))
    places = torch.arange(scores.shape[0], device=scores.device).unsqueeze(-1).expand_as(order)
    return torch.empty_like(order).scatter_(0, order, places)
