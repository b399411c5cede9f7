"""Command-line flags: one for each field, Megatron's exceptions, and refusals that name the flag."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from moe.arguments import (
    add_config_arguments,
    add_parallel_arguments,
    config_from_args,
    field_comments,
    flag_of,
    groups_from_args,
)
from moe.config import MoEConfig, TransformerConfig

LAYER = ["--hidden-size", "12", "--num-experts", "6", "--moe-ffn-hidden-size", "7"]
MODEL = [*LAYER, "--num-layers", "4", "--num-attention-heads", "6", "--vocab-size", "11"]


def parser_of(config_class: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_arguments(parser, config_class)
    return parser


def parse(flags: list[str], config_class: type = TransformerConfig) -> Any:
    base = MODEL if config_class is TransformerConfig else LAYER
    return config_from_args(parser_of(config_class).parse_args([*base, *flags]), config_class)


def refusal(flags: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the parser prints when it refuses the flags."""
    with pytest.raises(SystemExit) as caught:
        parser_of(TransformerConfig).parse_args([*MODEL, *flags])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("config_class", [MoEConfig, TransformerConfig])
def test_every_field_has_a_flag_with_its_comment_as_help(config_class: type) -> None:
    actions = parser_of(config_class)._option_string_actions
    comments = field_comments(config_class)
    for config_field in dataclasses.fields(config_class):
        assert comments[config_field.name], config_field.name
        if config_field.name == "params_dtype":
            assert {actions[f"--{name}"].dest for name in ("bf16", "fp16", "fp64")} == {"params_dtype"}
            continue
        action = actions[flag_of(config_field.name)]
        assert action.dest == config_field.name
        assert action.help == comments[config_field.name].replace("%", "%%")


def test_the_flags_that_are_not_the_fields_names() -> None:
    assert flag_of("moe_router_topk") == "--moe-router-topk"
    assert (flag_of("num_moe_experts"), flag_of("fp8")) == ("--num-experts", "--fp8-format")
    assert flag_of("layernorm_epsilon") == "--norm-epsilon"
    assert parse(["--norm-epsilon", "0.25"]).layernorm_epsilon == 0.25
    flags = parser_of(TransformerConfig)._option_string_actions
    assert not {"--num-moe-experts", "--fp8", "--layernorm-epsilon", "--params-dtype"} & flags.keys()


@pytest.mark.parametrize("config_class", [MoEConfig, TransformerConfig])
def test_without_further_flags_every_field_has_its_default(config_class: type) -> None:
    sizes = {"hidden_size": 12, "num_moe_experts": 6, "moe_ffn_hidden_size": 7}
    if config_class is TransformerConfig:
        sizes |= {"num_layers": 4, "num_attention_heads": 6, "vocab_size": 11}
    assert parse([], config_class) == config_class(**sizes)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--moe-router-topk", "3"], "moe_router_topk", 3),
        (["--moe-z-loss-coeff", "1e-3"], "moe_z_loss_coeff", 0.001),
        (["--moe-router-score-function", "sigmoid"], "moe_router_score_function", "sigmoid"),
        (["--moe-router-dtype", "fp64"], "moe_router_dtype", "fp64"),
        (["--moe-router-fusion"], "moe_router_fusion", True),
        (["--no-gated-linear-unit"], "gated_linear_unit", False),
        (["--gated-linear-unit"], "gated_linear_unit", True),
        (["--moe-latent-size", "5"], "moe_latent_size", 5),
        (["--activation-func-clamp-value", "7"], "activation_func_clamp_value", 7.0),
        (["--fp8-recipe", "mxfp8", "--moe-router-padding-for-quantization"], "fp8_recipe", "mxfp8"),
        (["--add-bias-linear"], "add_bias_linear", True),
        (["--disable-bias-linear"], "add_bias_linear", False),
        (["--bf16"], "params_dtype", torch.bfloat16),
        (["--fp16"], "params_dtype", torch.float16),
        (["--fp64"], "params_dtype", torch.float64),
        ([], "params_dtype", torch.float32),
    ],
)
def test_values(flags: list[str], name: str, value: Any) -> None:
    parsed = getattr(parse(flags), name)
    assert parsed == value
    assert type(parsed) is type(value)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Fields of every type that has a form on the command line."""

    needed: int  # no default
    wanted: str  # no default either
    ratio: float = 0.5  # 100 % of it
    kind: Literal["a", "b"] | None = None  # a choice
    size: int | None = None  # optional
    is_on: bool = True  # has a negation


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        (
            ["--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0"],
            {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        ),
        (
            ["--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "--moe-aux-loss-coeff", "0.1", "0.2"],
            {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2)},
        ),
        (["--moe-router-force-load-balancing"], {"moe_router_force_load_balancing": "random"}),
        (["--moe-router-force-load-balancing", "balanced"], {"moe_router_force_load_balancing": "balanced"}),
        ([], {"moe_router_force_load_balancing": False, "moe_router_load_balancing_type": "aux_loss"}),
        (["--moe-token-rounding-policy", "up"], {"moe_token_rounding_policy": "up"}),
        (["--moe-router-num-groups", "2", "--moe-router-group-topk", "1"], {"moe_router_num_groups": 2}),
    ],
    ids=str,
)
def test_flags_with_several_values_or_none(flags: list[str], values: dict[str, Any]) -> None:
    config = parse(flags)
    assert {name: getattr(config, name) for name in values} == values


def test_optional_literal_bool_and_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of(Forms)
    flags = ["--needed", "1", "--wanted", "x"]
    assert config_from_args(parser.parse_args(flags), Forms) == Forms(needed=1, wanted="x")
    flags += ["--kind", "b", "--size", "3", "--no-is-on", "--ratio", "2"]
    expected = Forms(needed=1, wanted="x", ratio=2.0, kind="b", size=3, is_on=False)
    assert config_from_args(parser.parse_args(flags), Forms) == expected
    assert "100 % of it" in parser.format_help()
    assert not {"--swiglu", "--squared-relu", "--disable-bias-linear"} & parser._option_string_actions.keys()
    with pytest.raises(SystemExit):
        parser.parse_args(["--kind", "c"])
    assert "invalid choice: 'c'" in capsys.readouterr().err


def test_missing_required_flags_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"^These flags are required: --needed, --wanted\.$"):
        config_from_args(parser_of(Forms).parse_args([]), Forms)
    parser = parser_of(TransformerConfig)
    parser.set_defaults(hidden_size=8, num_layers=1, vocab_size=4)
    with pytest.raises(ValueError, match=r"--moe-ffn-hidden-size, --num-experts, --num-attention-heads\."):
        config_from_args(parser.parse_args([]), TransformerConfig)


def test_a_type_without_a_form_is_refused() -> None:
    @dataclass
    class Listed:
        names: list[str] = field(default_factory=list)

    with pytest.raises(TypeError, match=r"config field names has the type list\[str\]"):
        parser_of(Listed)


def test_shorthands_of_the_activation() -> None:
    swiglu, squared = parse(["--swiglu"]), parse(["--squared-relu"])
    assert (swiglu.gated_linear_unit, swiglu.activation_func) == (True, "silu")
    assert (squared.gated_linear_unit, squared.activation_func) == (False, "squared_relu")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--swiglu", "--squared-relu"], r"--swiglu and --squared-relu contradict"),
        (["--swiglu", "--activation-func", "gelu"], r"--activation-func \(gelu\) contradicts --swiglu \(silu\)"),
        (["--swiglu", "--no-gated-linear-unit"], r"--gated-linear-unit \(False\) contradicts --swiglu \(True\)"),
        (["--squared-relu", "--activation-func", "gelu"], r"--activation-func \(gelu\) contradicts --squared-relu"),
        (["--fp8-format", "hybrid"], r"moe_ffn_hidden_size \(7\) must be divisible by 16 for recipe 'delayed'"),
        (["--fp8-format", "hybrid", "--fp4-format", "e2m1"], r"fp8 \('hybrid'\) and fp4 \('e2m1'\) exclude each other"),
        (["--moe-router-topk", "7"], r"moe_router_topk \(7\)"),
    ],
)
def test_contradictions_and_what_the_config_refuses(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(flags)


@pytest.mark.parametrize("flags", [["--bf16", "--fp64"], ["--add-bias-linear", "--disable-bias-linear"]])
def test_flags_that_exclude_each_other(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "not allowed with argument" in refusal(flags, capsys)


@pytest.mark.parametrize(
    ("text", "freq"),
    [
        ("2", 2),
        ("[0]*1+[1]*3", (0, 1, 1, 1)),
        (" ([0]+[1])*2 ", (0, 1, 0, 1)),
        ("[1, 0, 0, 1]", (1, 0, 0, 1)),
        ("(1, 0, 0, 1)", (1, 0, 0, 1)),
    ],
)
def test_forms_of_moe_layer_freq(text: str, freq: int | tuple[int, ...]) -> None:
    assert parse(["--moe-layer-freq", text]).moe_layer_freq == freq


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "[__import__('os').getpid()]*4",
        "[1]*[2]",
        "[1]-[0]",
        "2+2",
        "[True]*4",
        "[0.5]*4",
        "[0]*1+",
        "",
        "[1]*5000*5",
        "[1]*10000*10000*10000",
        "[0]" + "+[0]" * 5000,
        "(" * 500 + "1" + ")" * 500,
        "[1]\0",
    ],
)
def test_hostile_moe_layer_freq_is_refused_and_not_run(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(["--moe-layer-freq", text], capsys)
    assert "argument --moe-layer-freq: " in error
    assert "is neither a number nor a list such as [0]*1+[1]*3." in error
    assert len(error.splitlines()[-1]) < 200


def test_a_layer_pattern_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"moe_layer_freq \(\(0, 1\)\).*num_layers \(4\)"):
        parse(["--moe-layer-freq", "[0]*1+[1]*1"])


def test_parallel_flags() -> None:
    parser = argparse.ArgumentParser()
    add_parallel_arguments(parser)
    names = ("expert_model", "expert_tensor", "tensor_model")
    assert vars(parser.parse_args([])) == {f"{name}_parallel_size": 1 for name in (*names, "context")}
    assert groups_from_args(parser.parse_args([]), "cpu").ep.size() == 1
    for name in (*names, "context"):
        args = parser.parse_args([f"--{name}-parallel-size".replace("_", "-"), "2"])
        with pytest.raises(ValueError, match=rf"{name}_parallel_size \(2\)"):
            groups_from_args(args, "cpu")
