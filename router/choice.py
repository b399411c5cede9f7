"""The choice of experts: top-k of the scores, limited to groups, or dealt out evenly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from router.scores import RoutingRule, scores_of


def choose_experts(logits: Tensor, rule: RoutingRule, expert_bias: Tensor | None = None) -> Tensor:
    """Return the experts of each token: the top-k of its scores plus the bias, inside its best groups.

    Args:
        logits: [T, E], NaN and infinities included: a row decides for itself alone.
        rule: see RoutingRule.
        expert_bias: [E] added to the scores, or None.

    Returns:
        [T, K] int64, unique in each row and in range. Without bias and groups logits are compared instead of scores:
        the order is the same, and saturated scores do not tie.
    """
    logits = logits.detach()
    if expert_bias is None and rule.group_topk is None:
        return logits.topk(rule.topk, dim=-1).indices
    is_post_softmax = rule.score_function == "softmax" and not rule.use_pre_softmax
    scores = logits if is_post_softmax else scores_of(logits, rule.score_function)
    if expert_bias is not None:
        scores = scores + expert_bias
    if rule.group_topk is None or rule.num_groups is None:
        return scores.topk(rule.topk, dim=-1).indices
    sizes = (scores.shape[0], scores.shape[1], rule.num_groups, rule.group_topk)
    return group_limited_topk(scores, rule.topk, *sizes, group_score_topk=rule.group_score_topk)[1]


def group_limited_topk(
    scores: Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
    *,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the topk of each row among the experts of its best groups.

    Args:
        scores: [T, E], any sign.
        topk: K.
        num_tokens: T.
        num_experts: E; groups are num_groups runs of neighbours.
        num_groups: number of groups, a divisor of E.
        group_topk: groups that a token may choose from.
        group_score_topk: the score of a group is the sum of its best n; None: topk // group_topk, as in Megatron-Core.
            1 is the maximum (DeepSeek-V2), 2 is DeepSeek-V3.

    Returns:
        scores [T, K] at the choice, and the choice [T, K] int64.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.2; Megatron-Core
        moe_utils, function of the same name. Differs: the choice is among the open experts alone instead of masking
        the others with -inf, so a row of -inf cannot reach a closed group either.
    """
    group_size = num_experts // num_groups
    by_group = scores.view(num_tokens, num_groups, group_size)
    num_summed = topk // group_topk if group_score_topk is None else group_score_topk
    group_scores = by_group.topk(num_summed, dim=-1).values.sum(-1)  # [T, groups]
    groups = group_scores.topk(group_topk, dim=-1).indices.sort(dim=-1).values  # [T, open groups]
    members = torch.arange(group_size, device=scores.device)
    open_experts = (groups.unsqueeze(-1) * group_size + members).flatten(1)  # [T, open groups * group_size]
    best = scores.gather(1, open_experts).topk(topk, dim=-1)
    return best.values, open_experts.gather(1, best.indices)


def column_counts(routing_map: Tensor) -> Tensor:
    """Count the True entries of each column: [T, E] bool -> [E] int64.

    A sum on a CPU first casts its whole input to the dtype of the sum, 8 bytes an entry for int64. Here bytes add up as
    bytes, block on block, and only what is left is cast. A compiler casts as it sums, and its sizes may be symbols.
    """
    if torch.compiler.is_compiling():
        return routing_map.sum(0)
    num_tokens, num_experts = routing_map.shape
    blocks = math.gcd(num_tokens, 128)  # at most 255: a byte holds the sum over the blocks
    size = num_tokens // blocks
    summed = routing_map.view(torch.uint8).reshape(blocks, size * num_experts).sum(0, dtype=torch.uint8)
    return summed.view(size, num_experts).sum(0)


def balanced_experts(num_tokens: int, topk: int, num_experts: int, ep_size: int, device: torch.device) -> Tensor:
    """Return a fixed choice that loads every expert alike: they are dealt out to the slots in turn, a rank at a time.

    Example: 4 experts on 2 ranks, topk 2: the tokens get (0, 2), (1, 3), (0, 2), ...

    Returns:
        [T, K] int64; the counts of two experts differ by 1 at most.
    """
    slots = torch.arange(num_tokens * topk, device=device).view(num_tokens, topk) % num_experts
    return slots % ep_size * (num_experts // ep_size) + slots // ep_size  # the slot's rank, then its place there
