"""Settings of published models' MoE layers, under MoEConfig's field names."""

from __future__ import annotations

from typing import Any

# Sizes are those of the model named in the comment, as its published configuration states them. Losses belong to a
# training run, not to the model, and are off, except where the paper states one in the definition used here.
PRESETS: dict[str, dict[str, Any]] = {
    # Mixtral 8x7B, arXiv:2401.04088, table 1 and section 2.1: softmax over the two chosen logits.
    "mixtral": {
        "hidden_size": 4096,
        "moe_ffn_hidden_size": 14336,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
    },
    # Qwen1.5-MoE-A2.7B: softmax over all experts, not renormalised; one gated shared expert as wide as four experts.
    "qwen2_moe": {
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 1408,
        "num_moe_experts": 60,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 5632,
        "moe_shared_expert_gate": True,
    },
    # Qwen3-30B-A3B, arXiv:2505.09388, table 2: the chosen probabilities are renormalised, and no shared expert.
    "qwen3_moe": {
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 768,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
    },
    # OLMoE-1B-7B, arXiv:2409.02060, section 2 and table 1: softmax over all experts, not renormalised.
    "olmoe": {
        "hidden_size": 2048,
        "moe_ffn_hidden_size": 1024,
        "num_moe_experts": 64,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": True,
    },
    # DeepSeek-V2, arXiv:2405.04434, sections 2.2 and 3.1.2: the best expert of a group is its score, 3 of 8 groups are
    # open; two shared experts, which are one of twice the width.
    "deepseek_v2": {
        "hidden_size": 5120,
        "moe_ffn_hidden_size": 1536,
        "num_moe_experts": 160,
        "moe_router_topk": 6,
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 3,
        "moe_router_group_score_topk": 1,
        "moe_router_topk_scaling_factor": 16.0,
        "moe_shared_expert_intermediate_size": 3072,
    },
    # DeepSeek-V3, arXiv:2412.19437, section 2.1.2 (equations 13-20) and 4.2 (bias update speed, balance loss).
    "deepseek_v3": {
        "hidden_size": 7168,
        "moe_ffn_hidden_size": 2048,
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_group_score_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_shared_expert_intermediate_size": 2048,
    },
    # gpt-oss-120b, arXiv:2508.10925, section 2: softmax over the chosen logits, biases everywhere, clamped SwiGLU.
    "gpt_oss": {
        "hidden_size": 2880,
        "moe_ffn_hidden_size": 2880,
        "num_moe_experts": 128,
        "moe_router_topk": 4,
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    },
    # GLM-4.5-Air, arXiv:2508.06471, section 2.1: sigmoid scores, a bias for the choice, one shared expert.
    "glm4_moe": {
        "hidden_size": 4096,
        "moe_ffn_hidden_size": 1408,
        "num_moe_experts": 128,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 1408,
    },
}


def preset_fields(name: str) -> dict[str, Any]:
    """Return the fields of MoEConfig that make a published model's layer; see `MoEConfig.preset`.

    Coefficients of losses are a matter of the training run and stay at 0, but for the sequence loss of DeepSeek-V3.

    Returns:
        A new dict.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset ({name!r}) must be one of {', '.join(map(repr, PRESETS))}.")
    return dict(PRESETS[name])
