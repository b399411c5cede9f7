"""A Mixture-of-Experts layer under Megatron-Core's names, as a small standalone PyTorch library."""

from dispatchers import (
    CommunicationCounter,
    ExpertInput,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoECapacityTokenDispatcher,
    MoEDeduplicatedTokenDispatcher,
    permute,
    release_host_memory,
    sort_chunks_by_idxs,
    unpermute,
)
from moe.activations import Activation
from moe.block import MoETransformerBlock
from moe.checkpoint import load_checkpoint, save_checkpoint
from moe.checkpoint_async import AsyncCheckpointer
from moe.config import MoEConfig, TransformerConfig
from moe.expert_linear import MasterWeights
from moe.experts import GroupedMLP
from moe.export import export_safetensors, import_safetensors
from moe.fsdp import apply_fsdp
from moe.gradients import clip_grad_norm, finalize_gradients
from moe.layer import MoELayer
from moe.metrics import MoEMetrics, collect_metrics
from moe.model import MoEGPT
from moe.parallel import ProcessGroups
from moe.quantization.delayed import update_delayed_scales
from moe.quantization.weights import keep_quantized_weights
from moe.shared_experts import MLP, SharedExpertMLP
from moe.zero_experts import ZeroComputationExperts
from router import (
    ExpertChoiceRouter,
    RoutingMapPadding,
    RoutingRecords,
    TopKRouter,
    apply_router_token_dropping,
    apply_token_rounding,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_updated_expert_bias,
    group_limited_topk,
    pad_routing_map,
    recompute,
    set_loss_scale,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    update_expert_bias,
    z_loss_func,
)

__all__ = [
    "MLP",
    "Activation",
    "AsyncCheckpointer",
    "CommunicationCounter",
    "ExpertChoiceRouter",
    "ExpertInput",
    "GroupedMLP",
    "MasterWeights",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoECapacityTokenDispatcher",
    "MoEConfig",
    "MoEDeduplicatedTokenDispatcher",
    "MoEGPT",
    "MoELayer",
    "MoEMetrics",
    "MoETransformerBlock",
    "ProcessGroups",
    "RoutingMapPadding",
    "RoutingRecords",
    "SharedExpertMLP",
    "TopKRouter",
    "TransformerConfig",
    "ZeroComputationExperts",
    "apply_fsdp",
    "apply_router_token_dropping",
    "apply_token_rounding",
    "clip_grad_norm",
    "collect_metrics",
    "compute_routing_scores_for_aux_loss",
    "export_safetensors",
    "finalize_gradients",
    "get_capacity",
    "get_updated_expert_bias",
    "group_limited_topk",
    "import_safetensors",
    "keep_quantized_weights",
    "load_checkpoint",
    "pad_routing_map",
    "permute",
    "recompute",
    "release_host_memory",
    "save_checkpoint",
    "set_loss_scale",
    "sinkhorn",
    "sort_chunks_by_idxs",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "update_delayed_scales",
    "update_expert_bias",
    "z_loss_func",
]
