"""How many tokens an expert takes: capacity with dropping, and rounding of counts to a multiple."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the slots of an expert, ceil(num_tokens / num_experts * capacity_factor), at least min_capacity.

    Args:
        num_tokens: token slots over all experts, T * K.
        num_experts: E, at least 1.
        capacity_factor: 1 is room for a balanced load.
        min_capacity: lower bound, or None.

    Raises:
        ValueError: no experts, or a factor that is not positive and finite.

    Source: Switch Transformers, arXiv:2101.03961, section 2.2, equation 3; Megatron-Core moe_utils.
    """
    if not 0.0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor ({capacity_factor}) must be a positive, finite number, such as 1.0.")
    if num_experts < 1:
        raise ValueError(f"num_experts ({num_experts}) must be at least 1.")
    capacity = math.ceil((num_tokens / num_experts) * capacity_factor)
    return capacity if min_capacity is None else max(capacity, min_capacity)


def slots_of_expert(num_tokens: int, topk: int, num_experts: int, capacity_factor: float) -> int:
    """Return C for num_tokens tokens with topk experts each: their capacity, and never more than there are tokens."""
    return min(get_capacity(num_tokens * topk, num_experts, capacity_factor), num_tokens)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
    *,
    padding_mask: Tensor | None = None,
    capacity_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Let each expert keep at most its capacity C = ceil(T * K / E * factor) of this rank's tokens.

    A dropped pair has the prob 0; the other weights of its token stay as they are.

    Args:
        routing_probs: [T, E] float, zero where not routed.
        routing_map: [T, E] bool, True where routed.
        router_topk: K.
        capacity_factor: see `get_capacity`.
        drop_policy: who stays: "probs" the largest probs (NaN last, of equal ones the first token), "position" the
            first tokens.
        pad_to_capacity: every expert gets exactly min(C, T) tokens, so that shapes depend on T alone. Added ones are
            the first free tokens, with prob 0: real tokens, whose outputs do not count. Tokens of padding_mask are
            added only where no other is left.
        padding_mask: [T] bool, True = padding: never kept, even if routed. T in the formula is the number of other
            tokens, so that they have the capacity they would have alone. With pad_to_capacity T is all tokens, for the
            shapes' sake.
        capacity_tokens: T of the formula, whatever this rank holds: ranks with different numbers of tokens then have
            one capacity. None: as above.

    Returns:
        probs [T, E] in the dtype of routing_probs and routing_map [T, E] bool, in new storage. No host sync.

    Raises:
        ValueError: an unknown policy, a factor that is not positive and finite, K outside 1..E, or shapes or dtypes
            that do not fit.

    Source: Megatron-Core moe_utils, function of the same name. Differs: "position" keeps the first tokens (there it is
        a top-k over equal values, so any of them; the counts are the same); among equal probs a routed pair comes
        before one that is not, and the first token first.
    """
    _check_pairs("routing_probs", routing_probs, routing_map, padding_mask)
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy ({drop_policy!r}) must be 'probs' or 'position'.")
    num_tokens, num_experts = routing_map.shape
    if not 1 <= router_topk <= num_experts:
        raise ValueError(f"router_topk ({router_topk}) must lie between 1 and the number of experts ({num_experts}).")
    of_formula = capacity_tokens or num_tokens
    num_rows = min(slots_of_expert(of_formula, router_topk, num_experts, capacity_factor), num_tokens)
    capacity: int | Tensor = num_rows
    if padding_mask is not None and not pad_to_capacity and capacity_tokens is None:
        capacity = _capacity_of_valid(padding_mask, router_topk, num_experts, capacity_factor)
    open_pairs = routing_map if padding_mask is None else routing_map & ~padding_mask.unsqueeze(-1)
    place = rank_by_score(routing_probs, open_pairs) if drop_policy == "probs" else open_pairs.cumsum(0) - 1  # [T, E]
    kept = open_pairs & (place < capacity)
    probs = torch.where(kept, routing_probs, 0.0)
    if pad_to_capacity:
        kept = kept | (_place_among_free(kept, padding_mask) < num_rows - kept.sum(0))
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
        weights: [T, E] float, the weight that each pair has or would have; see `dense_weights`. NaN comes last.
        routing_map: [T, E] bool, the tokens' own choice, True where routed.
        multiple: rows of a tile.
        policy: "nearest" (halves up), "up" or "down".
        padding_mask: [T] bool, True = padding: neither counted nor kept, even if routed, nor added.

    Returns:
        probs and routing_map [T, E] in new storage; every column sum is a multiple, and differs from the choice by less
        than one. Where too few tokens are left to go up, it is the largest multiple there is. No host sync.

    Raises:
        ValueError: an unknown policy, multiple < 1, or shapes or dtypes that do not fit.

    Source: SonicMoE, arXiv:2512.14080, token rounding: each count goes to a multiple of the tile, chosen tokens first.
    """
    _check_pairs("weights", weights, routing_map, padding_mask)
    if multiple < 1:
        raise ValueError(f"multiple ({multiple}) must be at least 1; 1 leaves every count as it is.")
    offsets = {"nearest": multiple // 2, "up": multiple - 1, "down": 0}
    if policy not in offsets:
        raise ValueError(f"policy ({policy!r}) must be one of {', '.join(map(repr, offsets))}.")
    valid = torch.ones_like(routing_map) if padding_mask is None else ~padding_mask.unsqueeze(-1).expand_as(routing_map)
    chosen = routing_map & valid
    counts = chosen.sum(0)  # [E]
    rounded = (counts + offsets[policy]) // multiple * multiple  # 0 stays 0: every offset is less than multiple
    target = torch.minimum(rounded, valid.sum(0) // multiple * multiple)
    kept = rank_by_score(weights, chosen, valid) < target  # [T, E]; target <= valid tokens, which come first
    return torch.where(kept, weights, 0.0), kept


def rank_by_score(scores: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Return each token's place inside its expert, from 0: larger scores first, of equal ones the lower token.

    Args:
        scores: [T, E]; NaN comes last within its class, after -inf too.
        first: [T, E] bool, True for pairs that come before all others.
        second: [T, E] bool, True for pairs that come before the rest; None: all.

    Returns:
        [T, E] int64.
    """
    scores = scores.detach()
    is_nan = scores.isnan()
    order = scores.masked_fill(is_nan, -torch.inf).argsort(dim=0, descending=True, stable=True)  # token ids, best first
    classes = torch.where(first, 0, 2) if second is None else torch.where(first, 0, torch.where(second, 2, 4))
    order = order.gather(0, (classes + is_nan).gather(0, order).argsort(dim=0, stable=True))
    places = torch.arange(scores.shape[0], device=scores.device).unsqueeze(-1).expand_as(order)
    return torch.empty_like(order).scatter_(0, order, places)


def _capacity_of_valid(padding_mask: Tensor, topk: int, num_experts: int, capacity_factor: float) -> Tensor:
    """Return `get_capacity` of the tokens that are not padding, [] fp64 with the bits of the Python arithmetic.

    Both operands of the fraction are tensors: CUDA multiplies by the reciprocal of a Python divisor, and 525 / 75 * 1.0
    is then a little more than 7.
    """
    slots = padding_mask.logical_not().sum().double() * topk
    return (slots / torch.full_like(slots, num_experts) * capacity_factor).ceil()


def _place_among_free(kept: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return each free pair's place among those of its expert, [T, E] int64 from 0: token order, padding tokens last.

    kept [T, E] bool is True where a pair is not free; what stands there has no meaning.
    """
    free = ~kept
    if padding_mask is None:
        return free.cumsum(0) - 1
    is_padding = padding_mask.unsqueeze(-1)  # [T, 1]
    free = free & ~is_padding
    return torch.where(is_padding, free.sum(0) + is_padding.cumsum(0), free.cumsum(0)) - 1


def _check_pairs(name: str, values: Tensor, routing_map: Tensor, padding_mask: Tensor | None) -> None:
    """Raise ValueError unless values are [T, E] float, routing_map [T, E] bool and padding_mask [T] bool or None."""
    if values.dim() != 2 or routing_map.shape != values.shape:
        raise ValueError(
            f"{name} ({list(values.shape)}) and routing_map ({list(routing_map.shape)}) must both have the shape"
            f" [tokens, experts]; flatten [S, B] first."
        )
    if not values.is_floating_point() or routing_map.dtype != torch.bool:
        raise ValueError(
            f"{name} ({values.dtype}) must have a float dtype and routing_map ({routing_map.dtype}) be bool; pass"
            f" {name}.float() and routing_map.bool()."
        )
    if padding_mask is not None and (padding_mask.shape != values.shape[:1] or padding_mask.dtype != torch.bool):
        raise ValueError(
            f"padding_mask ({list(padding_mask.shape)}, {padding_mask.dtype}) must be bool of the shape"
            f" [{values.shape[0]}], True = padding; flatten [S, B] first."
        )
