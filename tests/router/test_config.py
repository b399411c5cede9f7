"""RouterConfig: defaults, frozen fields, and a message with the values for everything it refuses."""

import dataclasses

import pytest
import torch

from router import RouterConfig

NAN, INFINITY = float("nan"), float("inf")


def _config(**fields: object) -> RouterConfig:
    return RouterConfig(**{"hidden_size": 6, "num_moe_experts": 5, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size \(0\) must be a positive whole number"),
        ({"hidden_size": 6.0}, r"hidden_size \(6.0\) must be a positive whole number"),
        ({"num_moe_experts": -5}, r"num_moe_experts \(-5\) must be a positive whole number"),
        ({"num_moe_experts": True}, r"num_moe_experts \(True\) must be a positive whole number"),
        ({"moe_router_topk": 0}, r"moe_router_topk \(0\) must be a positive whole number"),
        ({"moe_router_topk": 2.0}, r"moe_router_topk \(2.0\) must be a positive whole number"),
        ({"moe_router_topk": "2"}, r"moe_router_topk \('2'\) must be a positive whole number"),
        ({"moe_router_topk": 6}, r"moe_router_topk \(6\) must not exceed num_moe_experts \(5\)"),
        ({"init_method_std": 0.0}, r"init_method_std \(0.0\) must be a positive finite number"),
        ({"init_method_std": NAN}, r"init_method_std \(nan\) must be a positive finite number"),
        ({"init_method_std": INFINITY}, r"init_method_std \(inf\) must be a positive finite number"),
        ({"params_dtype": torch.int32}, r"params_dtype \(torch.int32\) must be torch.float64, float32, bfloat16 or"),
        ({"params_dtype": torch.float8_e4m3fn}, r"params_dtype \(torch.float8_e4m3fn\) must be"),
        ({"params_dtype": "fp32"}, r"params_dtype \(fp32\) must be"),
        ({"add_bias_linear": "no"}, r"add_bias_linear \('no'\) must be one of True, False"),
        ({"moe_router_fusion": "no"}, r"moe_router_fusion \('no'\) must be one of True, False"),
        ({"moe_router_score_function": "tanh"}, r"moe_router_score_function \('tanh'\).*'softmax', 'sigmoid'"),
        ({"moe_router_dtype": "bf16"}, r"moe_router_dtype \('bf16'\) must be one of 'fp32', 'fp64'"),
        ({"moe_router_load_balancing_type": "x"}, r"moe_router_load_balancing_type \('x'\).*'aux_loss', 'none'"),
        ({"moe_aux_loss_coeff": -0.1}, r"moe_aux_loss_coeff \(-0.1\) must be 0 \(off\) or a positive, finite"),
        ({"moe_aux_loss_coeff": INFINITY}, r"moe_aux_loss_coeff \(inf\) must be 0 \(off\) or a positive, finite"),
        ({"moe_z_loss_coeff": NAN}, r"moe_z_loss_coeff \(nan\) must be 0 \(off\) or a positive, finite"),
        ({"moe_z_loss_coeff": "0.1"}, r"moe_z_loss_coeff \('0.1'\) must be 0 \(off\) or a positive, finite"),
        (
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
            r"moe_aux_loss_coeff \(0.1\) has no effect with moe_router_load_balancing_type \('none'\); set",
        ),
        (
            {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"},
            r"moe_router_pre_softmax \(True\) belongs to moe_router_score_function 'softmax', not to 'sigmoid'",
        ),
        (
            {"moe_router_topk": 1},
            r"moe_router_topk \(1\) with softmax after top-k.*moe_router_pre_softmax=True or moe_router_score_function",
        ),
    ],
    ids=str,
)
def test_refused_values_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_router_topk": 5, "moe_aux_loss_coeff": 1},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
        {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1},
        {"params_dtype": torch.bfloat16, "moe_router_dtype": "fp64"},
    ],
    ids=str,
)
def test_the_ways_out_are_accepted(fields: dict[str, object]) -> None:
    config = _config(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


def test_losses_are_off_by_default_and_fields_are_frozen() -> None:
    config = _config()
    assert (config.moe_aux_loss_coeff, config.moe_z_loss_coeff, config.moe_router_fusion) == (0.0, 0.0, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.moe_router_topk = 3
    with pytest.raises(TypeError):
        RouterConfig(6, 5)
