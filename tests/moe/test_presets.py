"""Presets build, say what they are, and take overrides. Their routers are compared in tests/parity."""

import pytest
import torch

from moe import MoEConfig, MoELayer
from moe.presets import PRESETS, preset_fields
from tests import reference
from tests.tolerances import assert_close

SMALL = {"hidden_size": 12, "moe_ffn_hidden_size": 6, "params_dtype": torch.float64, "moe_router_dtype": "fp64"}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", (4096, 14336, 8, 2)),
        ("qwen2_moe", (2048, 1408, 60, 4)),
        ("qwen3_moe", (2048, 768, 128, 8)),
        ("olmoe", (2048, 1024, 64, 8)),
        ("deepseek_v2", (5120, 1536, 160, 6)),
        ("deepseek_v3", (7168, 2048, 256, 8)),
        ("gpt_oss", (2880, 2880, 128, 4)),
        ("glm4_moe", (4096, 1408, 128, 8)),
    ],
)
def test_sizes_are_the_published_ones(name: str, sizes: tuple[int, ...]) -> None:
    config = MoEConfig.preset(name)
    fields = ("hidden_size", "moe_ffn_hidden_size", "num_moe_experts", "moe_router_topk")
    assert tuple(getattr(config, field) for field in fields) == sizes


@pytest.mark.parametrize("name", PRESETS)
def test_losses_stay_off(name: str) -> None:
    config = MoEConfig.preset(name)
    stated = {"seq_aux_loss": 1e-4} if name == "deepseek_v3" else {}  # a part of the published router
    assert (config.aux_loss_coeffs, config.moe_z_loss_coeff) == (stated, 0.0)


def test_fields_are_a_copy() -> None:
    preset_fields("mixtral")["hidden_size"] = 1
    assert preset_fields("mixtral")["hidden_size"] == 4096


@pytest.mark.parametrize("name", PRESETS)
def test_a_small_layer_equals_the_reference(name: str) -> None:
    shared = (
        {"moe_shared_expert_intermediate_size": 5} if "moe_shared_expert_intermediate_size" in PRESETS[name] else {}
    )
    config = MoEConfig.preset(name, **SMALL, **shared, num_moe_experts=16)
    torch.manual_seed(0)
    layer = MoELayer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.normal_()
    hidden = torch.randn(5, 2, 12, dtype=torch.float64)
    probs, routing_map = reference.router(
        hidden.view(-1, 12),
        layer.router.weight,
        config.moe_router_topk,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        bias=layer.router.bias,
        expert_bias=layer.router.expert_bias,
        scaling_factor=config.moe_router_topk_scaling_factor,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score_topk=config.moe_router_group_score_topk,
    )
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset

    def act(fc1: torch.Tensor) -> torch.Tensor:
        return reference.activation(config.activation_func, fc1, clamp=clamp, offset=offset)

    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    expected = reference.experts(
        hidden.view(-1, 12), probs, routing_map, fc1.weight, fc2.weight, act, fc1_bias=fc1.bias, fc2_bias=fc2.bias
    )
    if layer.shared_experts is not None:
        expert = layer.shared_experts
        weights = (expert.linear_fc1.weight, expert.linear_fc2.weight)
        gate = expert.gate_weight if config.moe_shared_expert_gate else None
        expected = expected + reference.shared_expert(hidden.view(-1, 12), *weights, act, gate=gate)
    assert_close(layer(hidden), expected.view(5, 2, 12))


def test_unknown_names_and_overrides_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"preset \('mixtrall'\) must be one of 'mixtral', 'qwen2_moe'"):
        MoEConfig.preset("mixtrall")
    with pytest.raises(ValueError, match=r"num_groups \(8\) must divide the number of experts \(12\)"):
        MoEConfig.preset("deepseek_v3", num_moe_experts=12)
    config = MoEConfig.preset("mixtral", moe_aux_loss_coeff=0.02, num_moe_experts=4)
    assert (config.moe_aux_loss_coeff, config.num_moe_experts, config.hidden_size) == (0.02, 4, 4096)
