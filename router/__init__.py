"""Decides: which experts see a token and with what weight. Imports neither moe nor dispatchers."""

from router.balancing import get_updated_expert_bias, qb_dual_update, sinkhorn
from router.capacity import apply_router_token_dropping, apply_token_rounding, get_capacity
from router.choice import balanced_experts, group_limited_topk
from router.config import RouterConfig
from router.expert_choice import ExpertChoiceRouter
from router.gating import apply_input_jitter, apply_random_logits, router_gating_linear
from router.losses import (
    attach_loss,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from router.padding import RoutingMapPadding, pad_routing_map
from router.replay import RoutingRecords, recompute
from router.router import TopKRouter
from router.step import reset_global_aux_loss_tracker, set_loss_scale, update_expert_bias
from router.topk import topk_routing_with_score_function

__all__ = [
    "ExpertChoiceRouter",
    "RouterConfig",
    "RoutingMapPadding",
    "RoutingRecords",
    "TopKRouter",
    "apply_input_jitter",
    "apply_random_logits",
    "apply_router_token_dropping",
    "apply_token_rounding",
    "attach_loss",
    "balanced_experts",
    "compute_routing_scores_for_aux_loss",
    "get_capacity",
    "get_updated_expert_bias",
    "group_limited_topk",
    "pad_routing_map",
    "qb_dual_update",
    "recompute",
    "reset_global_aux_loss_tracker",
    "router_gating_linear",
    "set_loss_scale",
    "sinkhorn",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "update_expert_bias",
    "z_loss_func",
]
