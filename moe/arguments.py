"""Command-line flags derived from the config: one flag per field, named as Megatron-LM names it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import types
import typing
from typing import Any, Literal, NoReturn, TypeVar

import torch

from moe.parallel import ProcessGroups
from router.config import BALANCING_TYPES

# Fields whose flag is not their name with dashes.
FLAGS = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
}
PARALLEL_SIZES = {
    "expert_model_parallel_size": "EP: ranks that share out the experts",
    "expert_tensor_parallel_size": "ETP: ranks that share each expert",
    "tensor_model_parallel_size": "TP: ranks that hold slices of the same sequences",
    "context_parallel_size": "CP: ranks that hold context slices of the same sequences",
}
SHORTHANDS = {
    "swiglu": {"gated_linear_unit": True, "activation_func": "silu"},
    "squared_relu": {"gated_linear_unit": False, "activation_func": "squared_relu"},
}
MAX_LAYERS = 10000  # a longer --moe-layer-freq is a slip
Config = TypeVar("Config")


def flag_of(field_name: str) -> str:
    """Return the flag of a config field: moe_router_topk -> --moe-router-topk."""
    return FLAGS.get(field_name, "--" + field_name.replace("_", "-"))


def add_config_arguments(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add one flag per field of a config dataclass, with its comment as help.

    A bool that defaults to False is a switch; one that defaults to True also has --no-.... params_dtype is set by
    --bf16, --fp16 or --fp64 (default fp32). Megatron's --swiglu, --squared-relu and --disable-bias-linear are
    understood. Fields without a default are required unless `parser.set_defaults` gives them one.

    Args:
        parser: receives the flags in a group named after the class.
        config_class: a dataclass of plain settings.

    Raises:
        TypeError: a field of a type that has no flag form.
    """
    group = parser.add_argument_group(f"{config_class.__name__}")
    hints, notes = typing.get_type_hints(config_class), field_comments(config_class)
    for field in dataclasses.fields(config_class):
        note = notes.get(field.name, "").replace("%", "%%")
        default = None if field.default is dataclasses.MISSING else field.default
        if field.name == "params_dtype":
            dtypes = group.add_mutually_exclusive_group()
            for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)):
                help_text = f"parameters in {name} (default fp32)"
                dtypes.add_argument(f"--{name}", dest="params_dtype", action="store_const", const=dtype, help=help_text)
            parser.set_defaults(params_dtype=torch.float32)
        elif field.name == "add_bias_linear":
            biases = group.add_mutually_exclusive_group()
            biases.add_argument(flag_of(field.name), action="store_true", default=default, help=note)
            biases.add_argument("--disable-bias-linear", dest=field.name, action="store_false", help="the default")
        elif hints[field.name] is bool:
            action = argparse.BooleanOptionalAction if default else "store_true"
            group.add_argument(flag_of(field.name), dest=field.name, action=action, default=default, help=note)
        else:
            options = _value_options(hints[field.name], field.name)
            group.add_argument(flag_of(field.name), dest=field.name, default=default, help=note, **options)
    if "activation_func" in hints:
        group.add_argument("--swiglu", action="store_true", help="gated silu; the default here")
        group.add_argument("--squared-relu", action="store_true", help="ungated squared ReLU")


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `ProcessGroups.build`."""
    group = parser.add_argument_group("ProcessGroups")
    for name, note in PARALLEL_SIZES.items():
        group.add_argument(flag_of(name), type=int, default=1, help=note)


def config_from_args(args: argparse.Namespace, config_class: type[Config]) -> Config:
    """Return the config that the flags describe.

    Raises:
        ValueError: a field without a value, contradicting flags, or what the config itself refuses.
    """
    fields = dataclasses.fields(config_class)  # type: ignore[arg-type]  # every config class is a dataclass
    values = {field.name: getattr(args, field.name) for field in fields}
    for name, value in values.items():
        if isinstance(value, list):  # a flag with several values; one value is the value itself
            values[name] = value[0] if len(value) == 1 else tuple(value)
    missing = [flag_of(f.name) for f in fields if f.default is dataclasses.MISSING and values[f.name] is None]
    if missing:
        raise ValueError(f"These flags are required: {', '.join(missing)}.")
    if getattr(args, "swiglu", False) and getattr(args, "squared_relu", False):
        raise ValueError("--swiglu and --squared-relu contradict each other; give one of them.")
    defaults = {field.name: field.default for field in fields}
    for shorthand, meaning in SHORTHANDS.items():
        if not getattr(args, shorthand, False):
            continue
        for name, value in meaning.items():
            if values[name] not in (value, defaults[name]):
                raise ValueError(f"{flag_of(name)} ({values[name]}) contradicts {flag_of(shorthand)} ({value}).")
        values.update(meaning)
    return config_class(**values)


def groups_from_args(args: argparse.Namespace, device_type: str) -> ProcessGroups:
    """Return the process groups that the flags of `add_parallel_arguments` describe.

    Raises:
        ValueError: sizes that do not fit the number of ranks.
    """
    return ProcessGroups.build(**{name: getattr(args, name) for name in PARALLEL_SIZES}, device_type=device_type)


def _value_options(hint: Any, name: str) -> dict[str, Any]:
    """Return argparse's type and choices for a type hint."""
    if name in SPECIAL:
        return SPECIAL[name]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [k for k in typing.get_args(hint) if k is not type(None)] if is_union else [hint]
    if len(kinds) == 1 and typing.get_origin(kinds[0]) is Literal:
        return {"choices": typing.get_args(kinds[0])}
    if len(kinds) == 1 and kinds[0] in (int, float, str):
        return {"type": kinds[0]}
    raise TypeError(f"The config field {name} has the type {hint}, which has no form on the command line.")


def _layer_pattern(text: str) -> int | tuple[int, ...]:
    """Read Megatron's --moe-layer-freq: a number, or a list such as "[0]*1+[1]*3" (1: MoE, 0: dense)."""

    def refuse() -> NoReturn:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise argparse.ArgumentTypeError(f"{shown!r} is neither a number nor a list such as [0]*1+[1]*3.")

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [value(element) for element in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
                return left * right if len(left) * right <= MAX_LAYERS else refuse()
        return refuse()

    try:
        parsed = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all that ast.parse raises on hostile text
        refuse()
    return parsed if isinstance(parsed, int) else tuple(parsed)


# Fields whose type has no form of its own. Without a value, --moe-router-force-load-balancing is Megatron's switch.
SPECIAL: dict[str, dict[str, Any]] = {
    "moe_layer_freq": {"type": _layer_pattern},
    "moe_router_load_balancing_type": {"nargs": "+", "choices": BALANCING_TYPES},
    "moe_aux_loss_coeff": {"nargs": "+", "type": float},
    "moe_router_force_load_balancing": {"nargs": "?", "const": "random", "choices": ("random", "balanced")},
}


def field_comments(config_class: type) -> dict[str, str]:
    """Return the comment behind each field in the source of the class and its bases."""
    comments: dict[str, str] = {}
    for cls in reversed(config_class.__mro__[:-1]):
        comments.update(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), flags=re.MULTILINE))
    return comments
