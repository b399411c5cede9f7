"""Presets against the routers and configurations of Hugging Face transformers."""

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import MoEConfig
from router import TopKRouter
from tests.parity.megatron import draw
from tests.tolerances import assert_close

CLASSES = {  # preset: the router's class and the configuration's
    "mixtral": ("MixtralTopKRouter", "MixtralConfig"),
    "qwen2_moe": ("Qwen2MoeTopKRouter", "Qwen2MoeConfig"),
    "qwen3_moe": ("Qwen3MoeTopKRouter", "Qwen3MoeConfig"),
    "olmoe": ("OlmoeTopKRouter", "OlmoeConfig"),
    "deepseek_v2": ("DeepseekV2TopkRouter", "DeepseekV2Config"),
    "deepseek_v3": ("DeepseekV3TopkRouter", "DeepseekV3Config"),
    "gpt_oss": ("GptOssTopKRouter", "GptOssConfig"),
    "glm4_moe": ("Glm4MoeTopkRouter", "Glm4MoeConfig"),
}
# What the published configurations state besides sizes, where transformers has another default.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
}
GROUPED = ("deepseek_v2", "deepseek_v3")
HIDDEN_SIZE = 24


def their_config(name: str, **fields: Any) -> Any:
    """Return transformers' configuration; its default is a published model, mostly the one of the preset."""
    module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    return getattr(module, CLASSES[name][1])(**PUBLISHED.get(name, {}), **fields)


def their_router(name: str, num_experts: int, topk: int, groups: tuple[int, int]) -> torch.nn.Module:
    """Return transformers' router with the published options and small sizes."""
    experts = "num_local_experts" if name in ("mixtral", "gpt_oss") else "num_experts"
    if name in (*GROUPED, "glm4_moe"):
        experts = "n_routed_experts"
    fields = {"hidden_size": HIDDEN_SIZE, experts: num_experts, "num_experts_per_tok": topk}
    fields |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    if name in GROUPED:
        fields |= {"n_group": groups[0], "topk_group": groups[1]}
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    return getattr(module, CLASSES[name][0])(their_config(name, **fields))


def our_router(name: str, num_experts: int, topk: int, groups: tuple[int, int], *, fusion: bool) -> TopKRouter:
    """Return the preset's router with small sizes."""
    fields: dict[str, Any] = {"hidden_size": HIDDEN_SIZE, "num_moe_experts": num_experts, "moe_router_topk": topk}
    if name in GROUPED:
        fields |= {"moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1]}
    return TopKRouter(MoEConfig.preset(name, **fields, moe_router_fusion=fusion, moe_aux_loss_coeff=0.0))


@torch.no_grad()
def set_weights(router: torch.nn.Module, seed: int) -> None:
    """Give a router of either kind the weights and biases of a seed."""
    num_experts = router.weight.shape[0]
    router.weight.copy_(draw(num_experts, HIDDEN_SIZE, seed=seed) / 3)
    if getattr(router, "bias", None) is not None:
        router.bias.copy_(draw(num_experts, seed=seed + 1))
    for name in ("expert_bias", "e_score_correction_bias"):
        if getattr(router, name, None) is not None:
            getattr(router, name).copy_(draw(num_experts, seed=seed + 2) * 0.3)


def run(router: torch.nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Return probs and routing_map [T, E] and all gradients of a router of either kind for hidden [1, T, H]."""
    hidden = hidden.clone().requires_grad_()
    if isinstance(router, TopKRouter):
        probs, routing_map = router(hidden)
    else:
        _, weights, ids = router(hidden.flatten(0, 1))  # [T, K] in any order
        empty = torch.zeros(len(ids), router.weight.shape[0])
        probs, routing_map = empty.scatter(1, ids, weights), empty.bool().scatter(1, ids, True)
    (probs * draw(*probs.shape, seed=4)).sum().backward()
    found = {"probs": probs, "routing_map": routing_map, "hidden": hidden.grad, "weight": router.weight.grad}
    return found if getattr(router, "bias", None) is None else {**found, "bias": router.bias.grad}


@st.composite
def router_sizes(draw_from: st.DrawFn) -> tuple[int, int, tuple[int, int]]:
    """Draw E, K, and the number of groups with that of open ones; the best two of a group are its score."""
    num_groups, size = draw_from(st.integers(1, 5)), draw_from(st.integers(2, 8))
    group_topk = draw_from(st.integers(1, num_groups))
    return num_groups * size, draw_from(st.integers(2, group_topk * size)), (num_groups, group_topk)


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=40)
@given(sizes=router_sizes(), num_tokens=st.integers(1, 40), seed=st.integers(0, 99))
def test_selection_weights_and_gradients(
    name: str, fusion: bool, sizes: tuple[int, int, tuple[int, int]], num_tokens: int, seed: int
) -> None:
    ours, theirs = our_router(name, *sizes, fusion=fusion), their_router(name, *sizes)
    for router in (ours, theirs):
        set_weights(router, seed)
    hidden = draw(1, num_tokens, HIDDEN_SIZE, seed=seed + 3)
    actual, expected = run(ours, hidden), run(theirs, hidden)
    for key in ("probs", "routing_map"):
        assert_close(actual[key], expected[key], what=key)
    for key in expected.keys() - {"probs", "routing_map"}:  # gradients may cancel: the scale is that of the probs
        scale = max(expected[key].abs().max().item(), expected["probs"].max().item())
        assert (actual[key] - expected[key]).abs().max() <= 2e-5 * scale, key


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "deepseek_v2"])  # its default is a small one
def test_sizes_are_the_defaults(name: str) -> None:
    """What is no size here is compared above."""
    ours, theirs = MoEConfig.preset(name), their_config(name)
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    if name == "olmoe":  # transformers' default is twice the published width
        width //= 2
    num_experts = next(
        getattr(theirs, field)
        for field in ("n_routed_experts", "num_local_experts", "num_experts")
        if hasattr(theirs, field)
    )
    sizes = (theirs.hidden_size, width, num_experts, theirs.num_experts_per_tok)
    assert (ours.hidden_size, ours.moe_ffn_hidden_size, ours.num_moe_experts, ours.moe_router_topk) == sizes
    groups = (getattr(theirs, "n_group", 1), getattr(theirs, "topk_group", 1))
    assert (ours.moe_router_num_groups or 1, ours.moe_router_group_topk or 1) == groups
    assert (ours.moe_router_topk_scaling_factor or 1.0) == getattr(theirs, "routed_scaling_factor", 1.0)
    shared = getattr(theirs, "n_shared_experts", 0) * width
    shared = getattr(theirs, "shared_expert_intermediate_size", shared)
    assert (ours.moe_shared_expert_intermediate_size or 0) == shared
    assert ours.activation_func_clamp_value == getattr(theirs, "swiglu_limit", None)
