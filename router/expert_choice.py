"""ExpertChoiceRouter: each expert takes its best tokens, so every expert has the same load."""

from __future__ import annotations

import torch
from torch import Tensor

from router.capacity import apply_router_token_dropping
from router.choice import column_counts
from router.router import TopKRouter
from router.scores import scores_of


class ExpertChoiceRouter(TopKRouter):
    """Linear gate, scores over all experts, and for each expert the tokens that score best.

    An expert takes T * K / E * moe_expert_capacity_factor (1 if None) of this rank's T tokens, rounded up. A token has
    K experts on average, from none to all. Probs are the scores: softmax over all E, sigmoid or sqrtsoftplus, times
    moe_router_topk_scaling_factor. Balancing losses have no meaning; the z-loss applies.

    The choice of a token depends on the other tokens of the batch, later ones too: for a model that predicts the next
    token, training sees the future and generation has nothing to choose among. Use it for encoders.

    Args, Attributes, forward: those of TopKRouter.

    Source: Mixture-of-Experts with Expert Choice Routing, arXiv:2202.09368, section 3.2.
    """

    def decide(
        self, logits: Tensor, padding: Tensor | None, advance: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, E] logits -> probs [T, E], routing_map [T, E] with equal column sums, and that again."""
        scores = scores_of(logits, self.rule.score_function)
        if self.rule.scaling_factor is not None:
            scores = scores * self.rule.scaling_factor
        factor = self.config.moe_expert_capacity_factor or 1.0
        all_open = torch.ones_like(scores, dtype=torch.bool)
        topk, policy = self.rule.topk, self.config.moe_token_drop_policy
        probs, routing_map = apply_router_token_dropping(
            scores, all_open, topk, factor, policy, padding_mask=padding
        )  # the C best of all tokens
        advance["tokens_per_expert"] = column_counts(routing_map)
        return probs, routing_map, routing_map
