"""From logits to the routing decision: the two dense results probs and routing_map."""

from __future__ import annotations

import torch
from torch import Tensor

from router.choice import choose_experts
from router.fused import FusedTopK, backend_of
from router.scores import RoutingRule, chosen_weights, scores_of


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose topk experts for each token and weight them.

    softmax: weights are the softmax over the chosen logits, or with use_pre_softmax the chosen entries of the softmax
    over all E, not renormalised. sigmoid, sqrtsoftplus: the chosen scores divided by their sum (topk = 1: the score
    itself). The bias changes the choice alone, never a weight.

    Args:
        logits: [T, E]; fp32 or fp64, or a narrower float dtype, computed in fp32.
        topk: experts per token, 1 <= topk <= E.
        use_pre_softmax: softmax before the choice instead of after it.
        num_groups, group_topk: see `group_limited_topk`.
        scaling_factor: multiplies the weights.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus".
        expert_bias: [E] fp32, added to sigmoid or sqrtsoftplus scores for the choice.
        fused: one autograd node instead of one per step, values bitwise equal; on CUDA Transformer Engine's kernel if
            it is installed and takes these arguments.
        precomputed_indices: [T, K] int64 experts to use instead of choosing them; unique in each row.

    Returns:
        probs [T, E] in the dtype of logits, zero where not routed; routing_map [T, E] bool, True where routed.

    Raises:
        ValueError: shapes or options that do not fit, or topk = 1 with softmax after the choice.

    Source: Megatron-Core moe_utils, function of the same name. Differs: without bias and groups the choice compares
        logits, not scores, so saturated scores do not tie; the normalisation is exact for any scores (no 1e-20 under
        the fraction); fp64 logits are scored in fp64.
    """
    rule = RoutingRule(topk, use_pre_softmax, num_groups, group_topk, None, scaling_factor, score_function)
    if expert_bias is not None and score_function == "softmax":
        raise ValueError("expert_bias needs score_function 'sigmoid' or 'sqrtsoftplus', not 'softmax'.")
    wide = logits.float() if logits.itemsize < 4 else logits
    probs, routing_map = route(wide, rule, expert_bias, precomputed_indices, backend=backend_of(logits, fused=fused))
    return probs.to(logits.dtype), routing_map


def route(
    logits: Tensor,
    rule: RoutingRule,
    expert_bias: Tensor | None = None,
    expert_ids: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return probs and routing_map [T, E] by a rule; see `topk_routing_with_score_function`.

    Args:
        logits: [T, E] fp32 or fp64.
        rule: see RoutingRule.
        expert_bias: [E] fp32 or None.
        expert_ids: [T, K] int64, the choice if it is already made.
        backend: None for one autograd node per step, "torch" for one in all, "te" for Transformer Engine's kernel
            where it takes the arguments, and "torch" where it does not.

    Raises:
        ValueError: shapes that do not fit the rule.
    """
    rule.check(logits)
    if expert_ids is not None and expert_ids.shape != (logits.shape[0], rule.topk):
        raise ValueError(
            f"expert_ids ({list(expert_ids.shape)}) must have the shape [tokens, topk] ="
            f" [{logits.shape[0]}, {rule.topk}]."
        )
    if backend == "te":
        from router.fused_te import fused_topk, takes

        if expert_ids is None and takes(logits, rule):
            return fused_topk(logits, rule, expert_bias)
    if backend is not None:
        return FusedTopK.apply(logits, rule, expert_bias, expert_ids)
    if expert_ids is None:
        expert_ids = choose_experts(logits, rule, expert_bias)
    if rule.use_pre_softmax:
        weights = scores_of(logits, rule.score_function).gather(1, expert_ids)  # [T, E] -> [T, K]
    else:
        weights = chosen_weights(logits.gather(1, expert_ids), rule)  # [T, K]
    if rule.scaling_factor is not None:
        weights = weights * rule.scaling_factor
    probs = torch.zeros_like(logits).scatter_(1, expert_ids, weights)
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, expert_ids, True)
    return probs, routing_map
