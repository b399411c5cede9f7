"""Configuration: what is refused, with which values in the message, and the sizes derived from the fields."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from moe.config import MoEConfig, TransformerConfig

LAYER = {"hidden_size": 12, "num_moe_experts": 6, "moe_ffn_hidden_size": 7}
MODEL = {**LAYER, "num_layers": 4, "num_attention_heads": 6, "vocab_size": 11}
FP8 = {"fp8": "hybrid", "hidden_size": 32, "moe_ffn_hidden_size": 48}
PADDED = {"moe_router_padding_for_quantization": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size \(0\)"),
        ({"num_moe_experts": -1}, r"num_moe_experts \(-1\)"),
        ({"num_moe_experts": True}, r"num_moe_experts \(True\)"),
        ({"moe_ffn_hidden_size": 0}, r"moe_ffn_hidden_size \(0\)"),
        ({"moe_ffn_hidden_size": None}, r"moe_ffn_hidden_size \(None\)"),
        ({"init_method_std": float("nan")}, r"init_method_std \(nan\)"),
        ({"params_dtype": torch.int32}, r"params_dtype \(torch.int32\)"),
        ({"params_dtype": torch.float8_e4m3fn}, r"params_dtype \(torch.float8_e4m3fn\)"),
        ({"moe_router_topk": 7}, r"moe_router_topk \(7\).*num_moe_experts \(6\)"),
        ({"moe_router_topk": 1}, r"moe_router_topk \(1\).*moe_router_pre_softmax=True.*'sigmoid'"),
        ({"moe_router_score_function": "tanh"}, r"moe_router_score_function \('tanh'\).*'softmax', 'sigmoid'"),
        ({"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}, r"pre_softmax \(True\).*'sigmoid'"),
        ({"moe_router_dtype": "bf16"}, r"moe_router_dtype \('bf16'\)"),
        ({"moe_router_load_balancing_type": "sinkhorm"}, r"moe_router_load_balancing_type \('sinkhorm'\)"),
        ({"moe_aux_loss_coeff": -0.1}, r"moe_aux_loss_coeff \(-0.1\)"),
        ({"moe_z_loss_coeff": float("nan")}, r"moe_z_loss_coeff \(nan\)"),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"}, r"moe_aux_loss_coeff \(0.1\).*'none'"),
        ({"moe_token_dispatcher_type": "nccl"}, r"moe_token_dispatcher_type \('nccl'\)"),
        ({"activation_func": "relu"}, r"activation_func \('relu'\)"),
        ({"gated_linear_unit": False, "glu_linear_offset": 1.0}, r"glu_linear_offset \(1.0\)"),
        ({"activation_func_clamp_value": -7.0}, r"activation_func_clamp_value \(-7.0\)"),
        ({"moe_shared_expert_gate": True}, r"moe_shared_expert_intermediate_size \(None\)"),
        ({"moe_shared_expert_intermediate_size": 0}, r"moe_shared_expert_intermediate_size \(0\)"),
        ({"moe_latent_size": -3}, r"moe_latent_size \(-3\)"),
        ({"fp8": "e5m2"}, r"fp8 \('e5m2'\) must be one of None, 'hybrid', 'e4m3'"),
        ({"fp8": "hybrid"}, r"moe_ffn_hidden_size \(7\) must be divisible by 16 for recipe 'delayed'.*\[16\]"),
        ({**FP8, "hidden_size": 40}, r"hidden_size \(40\) must be divisible by 16.*\[32, 48\]"),
        ({**FP8, "fp8_recipe": "mxfp8"}, r"moe_ffn_hidden_size \(48\) must be divisible by 32.*'mxfp8'.*\[32, 64\]"),
        ({**FP8, "fp8_recipe": "blockwise"}, r"moe_ffn_hidden_size \(48\) must be divisible by 128.*\[128\]"),
        ({**FP8, "moe_latent_size": 20}, r"moe_latent_size \(20\) must be divisible by 16"),
        ({**FP8, "fp4": "e2m1"}, r"fp8 \('hybrid'\) and fp4 \('e2m1'\) exclude each other"),
        ({**FP8, "moe_deterministic": True}, r"moe_deterministic \(True\).*quantized experts \('delayed'\)"),
        ({**FP8, "fp8_margin": -1}, r"fp8_margin \(-1\)"),
        ({**FP8, "fp8_margin": 9}, r"fp8_margin \(9\).*0 to 8"),
        ({**FP8, "fp8_margin": 1.5}, r"fp8_margin \(1.5\)"),
        ({**FP8, "fp8_amax_history_len": 0}, r"fp8_amax_history_len \(0\)"),
        ({**FP8, "fp8_amax_compute_algo": "mean"}, r"fp8_amax_compute_algo \('mean'\)"),
        ({**FP8, "fp8_recipe": "rowwise", "fp8_margin": 1}, r"fp8_margin \(1\) belongs to .*'delayed'.*in rowwise"),
        ({"fp8_amax_history_len": 4}, r"fp8_amax_history_len \(4\) belongs to .*compute in params_dtype"),
        ({"fp8_wgrad": False}, r"fp8_wgrad \(False\) has no effect without fp8"),
        ({"fp8_param": True}, r"fp8_param \(True\) has no effect without fp8"),
        (
            {**FP8, "fp8_recipe": "rowwise", "fp8_param": True},
            r"fp8_param \(True\).*'rowwise'.*'tensorwise', 'delayed'",
        ),
        ({"fp8_scale_format": "pow2"}, r"fp8_scale_format \('pow2'\).*params_dtype"),
        (
            {**FP8, "hidden_size": 64, "moe_ffn_hidden_size": 64, "fp8_recipe": "mxfp8", "fp8_scale_format": "pow2"},
            "mxfp8",
        ),
        ({"fp4": "e3m0"}, r"fp4 \('e3m0'\)"),
        (
            {"moe_expert_backend": "torch", "moe_deterministic": True},
            r"moe_deterministic \(True\).*backend 'torch'",
        ),
        ({"moe_expert_backend": "cutlass"}, r"moe_expert_backend \('cutlass'\)"),
        ({**FP8, "moe_expert_backend": "torch"}, r"recipe \('delayed'\).*'torch'.*rowwise, mxfp8"),
        ({**FP8, "fp8_recipe": "rowwise", "moe_expert_backend": "torch"}, r"fp8 \('hybrid'\).*E4M3 alone"),
        ({**FP8, "fp8_recipe": "rowwise", "moe_expert_backend": "te"}, r"fp8_recipe \('rowwise'\).*'te'.*tensorwise"),
        ({**FP8, "fp8_param": True, "moe_expert_backend": "te"}, r"fp8_param \(True\).*'te'"),
        ({**FP8, "fp8_wgrad": False, "moe_expert_backend": "te"}, r"fp8_wgrad \(False\).*'te'"),
        ({"fp8_recipe": "mxfp8"}, r"fp8_recipe \('mxfp8'\) has no effect without fp8 or moe_router_padding_for_quant"),
        ({"fp8_recipe": "int4", **PADDED}, r"fp8_recipe \('int4'\).*'delayed'"),
    ],
)
@pytest.mark.parametrize("kind", [MoEConfig, TransformerConfig])
def test_refusals_of_the_layer(kind: type[MoEConfig], changes: dict[str, Any], message: str) -> None:
    base = LAYER if kind is MoEConfig else MODEL
    kind(**base)
    with pytest.raises(ValueError, match=message):
        kind(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, r"num_layers \(0\)"),
        ({"vocab_size": -1}, r"vocab_size \(-1\)"),
        ({"layernorm_epsilon": 0.0}, r"layernorm_epsilon \(0.0\)"),
        ({"rotary_base": 0}, r"rotary_base \(0\)"),
        ({"num_attention_heads": 5}, r"hidden_size \(12\).*num_attention_heads \(5\)"),
        ({"num_attention_heads": 4}, r"width of a head \(3\)"),
        ({"kv_channels": 5}, r"width of a head \(5\)"),
        ({"kv_channels": 0}, r"kv_channels \(0\)"),
        ({"num_query_groups": 4}, r"num_attention_heads \(6\).*num_query_groups \(4\)"),
        ({"ffn_hidden_size": 0}, r"ffn_hidden_size \(0\)"),
        ({"moe_layer_freq": 0}, r"moe_layer_freq \(0\)"),
        ({"moe_layer_freq": (1, 0)}, r"moe_layer_freq \(\(1, 0\)\).*num_layers \(4\)"),
        ({"moe_layer_freq": (1, 0, 2, 0)}, r"moe_layer_freq \(\(1, 0, 2, 0\)\)"),
        ({"moe_layer_freq": [1, 0, 1, 0]}, r"moe_layer_freq \(\[1, 0, 1, 0\]\).*tuple"),
        ({"moe_layer_freq": 1.5}, r"moe_layer_freq \(1.5\)"),
    ],
)
def test_refusals_of_the_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**MODEL, **changes})


@pytest.mark.parametrize("kind", [MoEConfig, TransformerConfig])
def test_frozen_keyword_only_and_hashable(kind: type[MoEConfig]) -> None:
    base = LAYER if kind is MoEConfig else MODEL
    config = kind(**base)
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 3  # type: ignore[misc]
    assert all(field.kw_only for field in fields(kind))
    with pytest.raises(TypeError, match="positional"):
        kind(12)  # type: ignore[misc]
    with pytest.raises(TypeError, match="moe_router_top_k"):
        kind(**base, moe_router_top_k=2)
    assert hash(config) == hash(kind(**base))


@pytest.mark.parametrize(
    ("recipe", "multiple"),
    [("delayed", 16), ("tensorwise", 16), ("rowwise", 16), ("mxfp8", 32), ("blockwise", 128)],
)
def test_the_padding_multiple_is_the_recipes(recipe: str, multiple: int) -> None:
    assert MoEConfig(**LAYER, **PADDED, fp8_recipe=recipe).pad_multiple == multiple
    sizes = {**LAYER, "hidden_size": 128, "moe_ffn_hidden_size": 128}
    assert MoEConfig(**sizes, fp8="hybrid", fp8_recipe=recipe).pad_multiple == multiple
    assert MoEConfig(**sizes, fp4="e2m1").pad_multiple == 128
    assert MoEConfig(**LAYER).pad_multiple == 1


def test_first_and_last_blocks_may_stay_unquantized() -> None:
    sizes = {**MODEL, "hidden_size": 128, "moe_ffn_hidden_size": 128, "num_attention_heads": 4}
    fp8 = {"fp8": "hybrid", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True}
    config = TransformerConfig(**sizes, **fp8, num_layers_at_start_in_bf16=2)
    assert [config.of_block(index).fp8 for index in range(4)] == [None, None, "hybrid", None]
    assert config.of_block(2) is config
    padded = TransformerConfig(**sizes, **fp8, **PADDED)
    assert [padded.of_block(index).pad_multiple for index in range(4)] == [32] * 4
    assert TransformerConfig(**sizes, fp8="hybrid").of_block(0).fp8 == "hybrid"
    for changes, message in (
        ({"fp8": None, "fp8_recipe": "delayed"}, r"first_last_layers_bf16 \(True\) has no effect without fp8"),
        ({"num_layers_at_end_in_bf16": 5}, r"num_layers_at_end_in_bf16 \(5\).*num_layers \(4\)"),
        ({"first_last_layers_bf16": False, "num_layers_at_start_in_bf16": 0}, r"num_layers_at_start_in_bf16 \(0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerConfig(**{**sizes, **fp8, **changes})


def test_sizes() -> None:
    assert MoEConfig(**LAYER).expert_hidden_size == 12
    assert MoEConfig(**LAYER, moe_latent_size=5).expert_hidden_size == 5
    assert TransformerConfig(**MODEL).head_size == 2
    assert TransformerConfig(**{**MODEL, "num_attention_heads": 5}, kv_channels=8).head_size == 8


@pytest.mark.parametrize(
    ("freq", "is_moe"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (3, [1, 0, 0, 1]), (9, [1, 0, 0, 0]), ((0, 1, 1, 0), [0, 1, 1, 0])],
)
def test_moe_layer_freq(freq: int | tuple[int, ...], is_moe: list[int]) -> None:
    config = TransformerConfig(**MODEL, moe_layer_freq=freq)
    assert [int(config.is_moe_layer(index)) for index in range(4)] == is_moe
