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
        ({"moe_router_load_balancing_type": "x"}, r"moe_router_load_balancing_type \('x'\).*'aux_loss', .*'none'"),
        ({"moe_router_load_balancing_type": []}, r"moe_router_load_balancing_type \(\(\)\) must be a tuple of"),
        (
            {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0]},
            r"\(\('none',\)\) must be a tuple of",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss"] * 2, "moe_aux_loss_coeff": [1, 1]},
            r"must name each loss once",
        ),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [1]},
            r"moe_aux_loss_coeff \(\(1,\)\) must have one number for each loss",
        ),
        ({"moe_aux_loss_coeff": [1]}, r"moe_aux_loss_coeff \(\(1,\)\) must have one number for each loss"),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_router_fusion": True},
            r"moe_router_fusion \(True\) has no",
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "sigmoid"},
            r"moe_router_score_function \('sigmoid'\) has no meaning: sinkhorn",
        ),
        (
            {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_topk": 5},
            r"moe_router_topk \(5\) must be below the number of experts \(5\)",
        ),
        ({"moe_router_enable_expert_bias": True}, r"moe_router_enable_expert_bias \(True\) needs .* 'sigmoid' or"),
        ({"moe_router_num_groups": 5}, r"num_groups \(5\) has no effect without moe_router_group_topk"),
        ({"moe_router_group_topk": 1}, r"group_topk \(1\) needs moe_router_num_groups"),
        (
            {"moe_router_group_topk": 1, "moe_router_num_groups": 2},
            r"num_groups \(2\) must divide .* \(5\): one of \[1, 5",
        ),
        (
            {"moe_router_group_topk": 6, "moe_router_num_groups": 5},
            r"group_topk \(6\) must not exceed moe_router_num_groups \(5\)",
        ),
        ({"moe_router_group_topk": 1, "moe_router_num_groups": 5}, r"topk \(2\) must not exceed the experts in"),
        (
            {"moe_router_group_topk": 3, "moe_router_num_groups": 5},
            r"group_topk \(3\) must not exceed moe_router_topk \(2\)",
        ),
        (
            {"moe_router_group_topk": 2, "moe_router_num_groups": 5, "moe_router_group_score_topk": 2},
            r"group_score_topk \(2\) must not exceed the 1 experts of a group",
        ),
        ({"moe_router_topk_scaling_factor": 0.0}, r"moe_router_topk_scaling_factor \(0.0\) must be a positive finite"),
        ({"moe_input_jitter_eps": 1.0}, r"moe_input_jitter_eps \(1.0\) must be below 1"),
        ({"moe_router_force_load_balancing": "even"}, r"moe_router_force_load_balancing \('even'\) must be one of"),
        ({"moe_router_quantile_balancing_ema": 1.0}, r"moe_router_quantile_balancing_ema \(1.0\) must lie in"),
        ({"moe_expert_capacity_factor": -1.0}, r"moe_expert_capacity_factor \(-1.0\) must be a positive finite"),
        ({"moe_token_drop_policy": "position"}, r"moe_token_drop_policy \('position'\) has no effect without"),
        ({"moe_pad_expert_input_to_capacity": True}, r"moe_pad_expert_input_to_capacity \(True\) needs a capacity"),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_token_rounding_policy": "up"},
            r"moe_token_rounding_policy \('up'\) and moe_expert_capacity_factor \(1.0\) both set",
        ),
        ({"moe_token_rounding_multiple": 64}, r"moe_token_rounding_multiple \(64\) has no meaning: there is no"),
        ({"moe_router_bias_update_rate": 0.1}, r"moe_router_bias_update_rate \(0.1\) has no meaning: there is no"),
        ({"moe_router_quantile_balancing_ema": 0.5}, r"ema \(0.5\) has no meaning: it belongs to quantile_balancing"),
        (
            {
                "moe_router_type": "expert_choice",
                "moe_expert_capacity_factor": 1.0,
                "moe_token_drop_policy": "position",
            },
            r"moe_token_drop_policy \('position'\) has no meaning: in expert_choice",
        ),
        ({"moe_token_rounding_multiple": 0}, r"moe_token_rounding_multiple \(0\) must be a positive whole"),
        ({"moe_num_null_experts": -1}, r"moe_num_null_experts \(-1\) must be 0 or a positive whole"),
        (
            {"moe_num_null_experts": 1, "moe_expert_capacity_factor": 1.0},
            r"capacity_factor \(1.0\) has no meaning: zero-c",
        ),
        (
            {"moe_num_null_experts": 1, "moe_router_topk": 7},
            r"\(7\) must not exceed num_moe_experts \(5\) and zero-comp",
        ),
        (
            {"moe_router_type": "expert_choice", "moe_aux_loss_coeff": 0.1},
            r"has no effect with moe_router_type 'expert_c",
        ),
        (
            {"moe_router_type": "expert_choice", "moe_router_fusion": True},
            r"moe_router_fusion \(True\) has no meaning: in",
        ),
        ({"moe_router_type": "expert_choice", "moe_num_null_experts": 1}, r"Zero-computation experts \(1\) need"),
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
        {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_topk": 1, "moe_router_type": "expert_choice"},
        {"moe_router_topk": 6, "moe_num_identity_experts": 1},
        {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2)},
        {"moe_router_force_load_balancing": "balanced", "moe_expert_capacity_factor": 0.5},
        {"moe_router_num_groups": 5, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
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


def test_lists_become_tuples_and_losses_of_weight_zero_are_left_out() -> None:
    config = _config(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1, 0, 2]
    )
    assert config.moe_aux_loss_coeff == (0.1, 0, 2)
    assert config.aux_loss_coeffs == {"aux_loss": 0.1, "global_aux_loss": 2.0}
    assert hash(config) == hash(dataclasses.replace(config))
    assert _config(moe_router_load_balancing_type="sinkhorn").aux_loss_coeffs == {}
