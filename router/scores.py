"""From logits to weights: the score functions, and the rule that says how a token's experts are chosen and weighted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from router.config import SCORE_FUNCTIONS, check_groups

# Below this, softplus(x) is exp(x) to the last bit of fp64, and log(softplus(x)) is x.
SOFTPLUS_IS_EXP = -40.0


@dataclass(frozen=True)
class RoutingRule:
    """How the experts of a token are chosen and weighted.

    Attributes:
        topk: K, experts per token.
        use_pre_softmax: softmax over all E before the choice, not renormalised; else over the K chosen logits.
        num_groups, group_topk: only the best group_topk of num_groups groups of neighbours are open to a token.
        group_score_topk: the score of a group is the sum of its best n; None: n = topk // group_topk.
        scaling_factor: the weights of a token times this.
        score_function: "softmax", "sigmoid" or "sqrtsoftplus", sqrt(log(1 + exp(x))).

    Raises:
        ValueError: values that contradict each other.
    """

    topk: int
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    scaling_factor: float | None = None
    score_function: str = "softmax"

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        check_score_function(self.score_function)
        if self.use_pre_softmax and self.score_function != "softmax":
            raise ValueError(
                f"use_pre_softmax (True) belongs to score_function 'softmax', not to {self.score_function!r}."
            )
        if self.topk == 1 and self.score_function == "softmax" and not self.use_pre_softmax:
            raise ValueError(
                "topk (1) with softmax after the choice has no gradient; use_pre_softmax=True or 'sigmoid'."
            )

    def check(self, logits: Tensor) -> None:
        """Raise ValueError unless logits are [T, E] with enough experts for this rule."""
        if logits.dim() != 2:
            raise ValueError(f"logits ({tuple(logits.shape)}) must have two dimensions, tokens and experts.")
        num_experts = logits.shape[1]
        if not 1 <= self.topk <= num_experts:
            raise ValueError(f"topk ({self.topk}) must lie between 1 and the number of experts ({num_experts}).")
        check_groups(self.topk, num_experts, self.num_groups, self.group_topk, self.group_score_topk)


def check_score_function(score_function: str) -> None:
    """Raise ValueError for an unknown score function."""
    if score_function not in SCORE_FUNCTIONS:
        raise ValueError(f"score_function ({score_function!r}) must be one of {', '.join(map(repr, SCORE_FUNCTIONS))}.")


def scores_of(logits: Tensor, score_function: str) -> Tensor:
    """Return the score of every expert: [T, E] -> [T, E]."""
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()  # no 0, where the slope of a root is inf


def log_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return the logarithm of every score, up to a constant of the row, exact where the score itself underflows.

    So s / sum(s) is a softmax of it, and normalised for any logits.
    """
    if score_function == "softmax":
        return logits
    if score_function == "sigmoid":
        return F.logsigmoid(logits)
    small = logits < SOFTPLUS_IS_EXP
    return torch.where(small, logits, F.softplus(logits.clamp(min=SOFTPLUS_IS_EXP)).log()) / 2


def log_scores_grad(logits: Tensor, score_function: str) -> Tensor | None:
    """Return the derivative of `log_scores`, element by element; None for softmax, where it is 1."""
    if score_function == "softmax":
        return None
    if score_function == "sigmoid":
        return logits.neg().sigmoid_()
    softplus = F.softplus(logits.clamp(min=SOFTPLUS_IS_EXP))
    return torch.where(logits < SOFTPLUS_IS_EXP, 0.5, logits.sigmoid() / softplus / 2)


def normalized_scores(logits: Tensor, score_function: str) -> Tensor:
    """Return the scores divided by their sum over all experts: [T, E] -> [T, E], each row sums to 1."""
    return log_scores(logits, score_function).softmax(-1)


def normalized_scores_grad(scores: Tensor, slopes: Tensor | None, grad: Tensor) -> Tensor:
    """Gradient of `normalized_scores` with respect to logits.

    Args:
        scores: [T, E], what `normalized_scores` returned.
        slopes: [T, E], `log_scores_grad`; None for softmax.
        grad: [T, E], the gradient of scores.
    """
    weighted = scores * grad
    weighted.addcmul_(scores, weighted.sum(-1, keepdim=True), value=-1.0)
    return weighted if slopes is None else weighted.mul_(slopes)


def chosen_weights(chosen_logits: Tensor, rule: RoutingRule) -> Tensor:
    """[T, K] logits of the chosen experts -> [T, K] weights, before the scaling factor; not for pre-softmax."""
    if chosen_logits.shape[-1] == 1:
        return scores_of(chosen_logits, rule.score_function)
    return normalized_scores(chosen_logits, rule.score_function)


def dense_weights(logits: Tensor, routing_map: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weight that each expert has, or would have beside the chosen ones of its token.

    Args:
        logits: [T, E].
        routing_map: [T, E] bool, the experts over which weights are normalised.
        rule: how they are weighted.

    Returns:
        [T, E]; where routed, the probs of `topk_routing_with_score_function`. Where a choice was limited or forced, an
        expert that was not chosen may score higher: its weight is bounded by 1 (times the scaling factor).
    """
    if rule.use_pre_softmax or rule.topk == 1:
        weights = scores_of(logits, rule.score_function)
    else:
        logs = log_scores(logits, rule.score_function)
        over = routing_map | ~routing_map.any(-1, keepdim=True)  # a token that is routed nowhere: over all experts
        weights = (logs - logs.masked_fill(~over, -torch.inf).logsumexp(-1, keepdim=True)).clamp(max=0.0).exp()
    return weights if rule.scaling_factor is None else weights * rule.scaling_factor
