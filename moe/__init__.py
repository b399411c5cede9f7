"""A Mixture-of-Experts layer under Megatron-Core's names, as a small standalone PyTorch library."""

from dispatchers import ExpertInput, MoEAlltoAllTokenDispatcher, permute, sort_chunks_by_idxs, unpermute
from moe.activations import Activation
from moe.block import MoETransformerBlock
from moe.checkpoint import load_checkpoint, save_checkpoint
from moe.config import MoEConfig, TransformerConfig
from moe.experts import GroupedMLP
from moe.layer import MoELayer
from moe.metrics import MoEMetrics, collect_metrics
from moe.model import MoEGPT
from moe.parallel import ProcessGroups, clip_grad_norm, finalize_gradients
from moe.shared_experts import MLP, SharedExpertMLP
from router import (
    RoutingMapPadding,
    TopKRouter,
    compute_routing_scores_for_aux_loss,
    pad_routing_map,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

__all__ = [
    "MLP",
    "Activation",
    "ExpertInput",
    "GroupedMLP",
    "MoEAlltoAllTokenDispatcher",
    "MoEConfig",
    "MoEGPT",
    "MoELayer",
    "MoEMetrics",
    "MoETransformerBlock",
    "ProcessGroups",
    "RoutingMapPadding",
    "SharedExpertMLP",
    "TopKRouter",
    "TransformerConfig",
    "clip_grad_norm",
    "collect_metrics",
    "compute_routing_scores_for_aux_loss",
    "finalize_gradients",
    "load_checkpoint",
    "pad_routing_map",
    "permute",
    "save_checkpoint",
    "sort_chunks_by_idxs",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "z_loss_func",
]
