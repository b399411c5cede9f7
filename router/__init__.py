"""Decides: which experts see a token and with what weight. Imports neither moe nor dispatchers."""

from router.collectives import all_reduce_counts
from router.config import RouterConfig
from router.gating import router_gating_linear
from router.losses import (
    attach_loss,
    compute_routing_scores_for_aux_loss,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from router.padding import RoutingMapPadding, pad_routing_map
from router.router import TopKRouter
from router.topk import topk_routing_with_score_function

__all__ = [
    "RouterConfig",
    "RoutingMapPadding",
    "TopKRouter",
    "all_reduce_counts",
    "attach_loss",
    "compute_routing_scores_for_aux_loss",
    "pad_routing_map",
    "router_gating_linear",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "z_loss_func",
]
