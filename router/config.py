"""Settings of the router: what is decided, how it is scored, which losses balance it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Router settings under Megatron-Core's field names; checked at construction.

    Raises:
        ValueError: a value out of range, or two fields that contradict each other.
    """

    hidden_size: int  # H, width of a token
    num_moe_experts: int  # E, experts over all ranks
    params_dtype: torch.dtype = torch.float32  # dtype of the parameters at construction
    add_bias_linear: bool = False  # biases in router, experts and shared expert; published MoE models mostly have none
    init_method_std: float = 0.02  # standard deviation of the normal initial weights

    moe_router_topk: int = 2  # K, experts per token
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"  # from logits to scores
    moe_router_pre_softmax: bool = False  # softmax over all E before top-k; else over the K chosen logits
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"  # logits, scores and probs; bf16 logits tie and flip choices
    moe_router_fusion: bool = False  # one autograd function for score + top-k + scatter, bitwise the same values
    moe_router_load_balancing_type: Literal["aux_loss", "none"] = "aux_loss"  # with a coefficient of 0: no loss
    moe_aux_loss_coeff: float = 0.0  # weight of the switch load-balancing loss
    moe_z_loss_coeff: float = 0.0  # weight of the router z-loss

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        check_positive(self, "hidden_size", "num_moe_experts", "moe_router_topk", "init_method_std")
        check_choice(self, "moe_router_score_function", ("softmax", "sigmoid"))
        check_choice(self, "moe_router_dtype", tuple(ROUTER_DTYPES))
        check_choice(self, "moe_router_load_balancing_type", ("aux_loss", "none"))
        for name in ("add_bias_linear", "moe_router_pre_softmax", "moe_router_fusion"):
            check_choice(self, name, (True, False))
        dtype = self.params_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"params_dtype ({self.params_dtype}) must be torch.float64, float32, bfloat16 or float16.")
        if self.moe_router_topk > self.num_moe_experts:
            raise ValueError(
                f"moe_router_topk ({self.moe_router_topk}) must not exceed num_moe_experts ({self.num_moe_experts})."
            )
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            coeff = getattr(self, name)
            if not isinstance(coeff, int | float) or not 0.0 <= coeff < math.inf:
                raise ValueError(f"{name} ({coeff!r}) must be 0 (off) or a positive, finite number.")
        if self.moe_aux_loss_coeff and self.moe_router_load_balancing_type == "none":
            raise ValueError(
                f"moe_aux_loss_coeff ({self.moe_aux_loss_coeff}) has no effect with moe_router_load_balancing_type"
                " ('none'); set the type to 'aux_loss' or the coefficient to 0."
            )
        if self.moe_router_pre_softmax and self.moe_router_score_function != "softmax":
            raise ValueError(
                "moe_router_pre_softmax (True) belongs to moe_router_score_function 'softmax', not to"
                f" {self.moe_router_score_function!r}; leave it False."
            )
        if (
            self.moe_router_topk == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
        ):
            raise ValueError(
                "moe_router_topk (1) with softmax after top-k gives every token the prob 1 and the router no gradient;"
                " set moe_router_pre_softmax=True or moe_router_score_function='sigmoid'."
            )


def check_positive(config: Any, *names: str) -> None:
    """Raise ValueError unless each named field is positive and finite, and a whole number if declared as int."""
    declared = {field.name: str(field.type) for field in fields(config)}
    for name in names:
        value, is_whole = getattr(config, name), "int" in declared[name]
        allowed = int if is_whole else int | float
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < math.inf:
            raise ValueError(f"{name} ({value!r}) must be a positive {'whole' if is_whole else 'finite'} number.")


def check_choice(config: object, name: str, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless the named field is one of the allowed values."""
    value = getattr(config, name)
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(repr, allowed))}.")
