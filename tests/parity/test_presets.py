"""Presets against the routers of Hugging Face transformers, on random small configurations."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoEConfig
from router import TopKRouter
from tests.tolerances import assert_close

# preset: the router's class and config, and for each drawn size the config's fields
CLASSES = {
    "mixtral": ("MixtralTopKRouter", "MixtralConfig"),
    "qwen2_moe": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig"),
    "qwen3_moe": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig"),
    "olmoe": ("OlmoeTopKRouter", "OlmoeConfig"),
    "deepseek_v2": ("DeepseekV2TopkRouter", "DeepseekV2Config"),
    "deepseek_v3": ("DeepseekV3TopkRouter", "DeepseekV3Config"),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig"),
    "glm4_moe": ("Glm4MoeTopkRouter", "Glm4MoeConfig"),
}
PUBLISHED = {"qwen3_moe": {"norm_topk_prob": True}, "deepseek_v2": {"topk_method": "group_limited_greedy"}}
HIDDEN_SIZE = 24


def theirs(name: str, num_experts: int, topk: int, groups: tuple[int, int]) -> torch.nn.Module:
    """Return transformers' router with the published options and small sizes."""
    router_class, config_class = CLASSES[name]
    package = f"transformers.models.{name}"
    config_type = getattr(importlib.import_module(f"{package}.configuration_{name}"), config_class)
    router_type = getattr(importlib.import_module(f"{package}.modeling_{name}"), router_class)
    experts = "num_local_experts" if name in ("mixtral", "gpt_oss") else "num_experts"
    if name in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        experts = "n_routed_experts"
    fields: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, experts: num_experts, "num_experts_per_tok": topk}
    fields |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    if name in ("deepseek_v2", "deepseek_v3"):
        fields |= {"n_group": groups[0], "topk_group": groups[1]}
    if name == "deepseek_v2":
        fields |= {"routed_scaling_factor": 16.0}
    return router_type(config_type(**fields, **PUBLISHED.get(name, {})))


def dense(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """[T, K] weights and ids in any order -> [T, E]."""
    return weights.new_zeros(len(weights), num_experts).scatter(1, ids, weights)


SIZES = [(16, 4, (4, 2)), (12, 6, (3, 3)), (32, 6, (8, 3)), (8, 2, (2, 1)), (24, 5, (4, 4))]  # E, K, groups


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_selection_weights_and_gradients(name: str, fusion: bool, size: tuple[int, int, tuple[int, int]]) -> None:
    num_experts, topk, groups = size
    fields: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "num_moe_experts": num_experts, "moe_router_topk": topk}
    if name in ("deepseek_v2", "deepseek_v3"):
        fields |= {"moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1]}
    ours = TopKRouter(MoEConfig.preset(name, **fields, moe_router_fusion=fusion, moe_aux_loss_coeff=0.0))
    peer = theirs(name, num_experts, topk, groups)
    with torch.no_grad():
        for router in (ours, peer):
            torch.manual_seed(num_experts)
            router.weight.normal_()
            if getattr(router, "bias", None) is not None:
                router.bias.normal_()
            bias = router.expert_bias if router is ours else getattr(router, "e_score_correction_bias", None)
            if bias is not None:
                bias.copy_(torch.randn(num_experts) * 0.3)
    hidden = torch.randn(1, 33, HIDDEN_SIZE)
    results = []
    for router in (ours, peer):
        inputs = hidden.clone().requires_grad_()
        if router is ours:
            probs, routing_map = router(inputs)
        else:
            _, weights, ids = router(inputs.flatten(0, 1))
            probs = dense(weights, ids, num_experts)
            routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, ids, True)
        (probs * torch.linspace(-1, 1, num_experts)).sum().backward()
        found = {"probs": probs, "routing_map": routing_map, "hidden": inputs.grad, "weight": router.weight.grad}
        results.append(found if getattr(router, "bias", None) is None else {**found, "bias": router.bias.grad})
    for key, expected in results[1].items():
        assert_close(results[0][key], expected, what=key)
