"""Settings of the router: what is decided, how it is scored, which losses balance it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCING_TYPES = (*AUX_LOSSES, "sinkhorn", "quantile_balancing", "none")


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
    calculate_per_token_loss: bool = False  # a rank's loss is the sum over its tokens; finalize_gradients divides

    moe_router_type: Literal["topk", "expert_choice"] = "topk"  # expert_choice: experts choose tokens
    moe_router_topk: int = 2  # K, experts per token; expert_choice: on average
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"  # from logits to scores
    moe_router_pre_softmax: bool = False  # softmax over all E before top-k; else over the K chosen logits
    moe_router_topk_scaling_factor: float | None = None  # the probs of a token times this; None: 1
    moe_router_num_groups: int | None = None  # experts in equal groups of neighbours, for group-limited top-k
    moe_router_group_topk: int | None = None  # groups a token may choose from; None: no limit
    moe_router_group_score_topk: int | None = None  # a group's score sums its best n; None: topk // group_topk
    moe_router_enable_expert_bias: bool = False  # a bias on the scores, for the choice alone, moved by the load
    moe_router_bias_update_rate: float = 1e-3  # how far update_expert_bias moves a bias per optimizer step
    moe_router_dtype: Literal["fp32", "fp64"] = "fp32"  # logits, scores and probs; bf16 logits tie and flip choices
    moe_router_fusion: bool = False  # one autograd function for the decision, one for the loss scores; on GPUs TE's
    moe_input_jitter_eps: float | None = None  # in training, router inputs times uniform(1 - eps, 1 + eps)
    moe_router_force_load_balancing: bool | Literal["random", "balanced"] = False  # for benchmarks; True: random

    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"  # a loss, a list of them, or another way
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0  # weight of each loss in moe_router_load_balancing_type
    moe_z_loss_coeff: float = 0.0  # weight of the router z-loss
    moe_router_quantile_balancing_ema: float = 0.0  # quantile_balancing: how much of the old bias a step keeps

    moe_expert_capacity_factor: float | None = None  # slots per expert over the mean T * K / E; None: drop nothing
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # who stays: the largest probs, or the first tokens
    moe_pad_expert_input_to_capacity: bool = False  # every expert gets exactly its capacity, so shapes are static
    moe_expert_capacity_tokens: int | None = None  # T that capacity is computed from; None: this rank's own tokens
    moe_token_rounding_policy: Literal["nearest", "up", "down"] | None = None  # in training, round counts by score
    moe_token_rounding_multiple: int = 128  # tokens per tile of the expert GEMM, what counts are rounded to

    moe_num_null_experts: int = 0  # experts that give zero: who chooses one has fewer real experts
    moe_num_identity_experts: int = 0  # experts that give the token itself
    moe_num_constant_experts: int = 0  # experts that mix the token with a learned vector (MoE++)

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_values()
        self._check_scores()
        self._check_balancing()
        self._check_capacity()
        self._check_other_routers()

    @property
    def num_zero_experts(self) -> int:
        """Z, experts without a GEMM: null, identity, constant, in the order of the router's columns after E."""
        return self.moe_num_null_experts + self.moe_num_identity_experts + self.moe_num_constant_experts

    @property
    def num_router_experts(self) -> int:
        """E + Z, the experts among which a router chooses."""
        return self.num_moe_experts + self.num_zero_experts

    @property
    def balancing_types(self) -> tuple[str, ...]:
        """moe_router_load_balancing_type as a tuple."""
        kind = self.moe_router_load_balancing_type
        return kind if isinstance(kind, tuple) else (kind,)

    @property
    def aux_loss_coeffs(self) -> dict[str, float]:
        """The auxiliary losses in use, with their coefficients, none of them 0."""
        coeff = self.moe_aux_loss_coeff
        coeffs = coeff if isinstance(coeff, tuple) else (coeff,)
        pairs = zip(self.balancing_types, coeffs, strict=True)
        return {kind: float(value) for kind, value in pairs if kind in AUX_LOSSES and value}

    def _check_values(self) -> None:
        check_positive(
            self,
            "hidden_size",
            "num_moe_experts",
            "moe_router_topk",
            "init_method_std",
            "moe_token_rounding_multiple",
            "moe_router_bias_update_rate",
        )
        for name in ("moe_router_topk_scaling_factor", "moe_expert_capacity_factor", "moe_input_jitter_eps"):
            check_positive_or_none(self, name)
        for name in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"):
            check_positive_or_none(self, name)
        for name in ("moe_num_null_experts", "moe_num_identity_experts", "moe_num_constant_experts"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} ({value!r}) must be 0 or a positive whole number.")
        check_choice(self, "moe_router_type", ("topk", "expert_choice"))
        check_choice(self, "moe_router_score_function", SCORE_FUNCTIONS)
        check_choice(self, "moe_router_dtype", tuple(ROUTER_DTYPES))
        check_choice(self, "moe_router_force_load_balancing", (False, True, "random", "balanced"))
        check_choice(self, "moe_token_drop_policy", ("probs", "position"))
        check_choice(self, "moe_token_rounding_policy", (None, "nearest", "up", "down"))
        for field in fields(self):
            if str(field.type) == "bool" and field.name in RouterConfig.__dataclass_fields__:
                check_choice(self, field.name, (True, False))
        dtype = self.params_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"params_dtype ({self.params_dtype}) must be torch.float64, float32, bfloat16 or float16.")
        if self.moe_router_topk > self.num_router_experts:
            experts = f"num_moe_experts ({self.num_moe_experts})"
            if self.num_zero_experts:
                experts += f" and zero-computation experts ({self.num_zero_experts})"
            raise ValueError(f"moe_router_topk ({self.moe_router_topk}) must not exceed {experts}.")
        if self.moe_input_jitter_eps is not None and self.moe_input_jitter_eps >= 1:
            raise ValueError(f"moe_input_jitter_eps ({self.moe_input_jitter_eps}) must be below 1, for example 0.01.")
        if not 0.0 <= self.moe_router_quantile_balancing_ema < 1.0:
            raise ValueError(
                f"moe_router_quantile_balancing_ema ({self.moe_router_quantile_balancing_ema}) must lie in [0, 1)."
            )

    def _check_scores(self) -> None:
        score_function = self.moe_router_score_function
        if self.moe_router_pre_softmax and score_function != "softmax":
            raise ValueError(
                "moe_router_pre_softmax (True) belongs to moe_router_score_function 'softmax', not to"
                f" {score_function!r}; leave it False."
            )
        if self.moe_router_enable_expert_bias and score_function == "softmax":
            raise ValueError(
                "moe_router_enable_expert_bias (True) needs moe_router_score_function 'sigmoid' or 'sqrtsoftplus', not"
                " 'softmax': the bias is added to scores that do not depend on each other."
            )
        if (
            self.moe_router_topk == 1
            and score_function == "softmax"
            and not self.moe_router_pre_softmax
            and self.moe_router_type == "topk"
            and "sinkhorn" not in self.balancing_types
        ):
            raise ValueError(
                "moe_router_topk (1) with softmax after top-k gives every token the prob 1 and the router no gradient;"
                " set moe_router_pre_softmax=True or moe_router_score_function='sigmoid'."
            )
        check_groups(
            self.moe_router_topk,
            self.num_moe_experts,
            self.moe_router_num_groups,
            self.moe_router_group_topk,
            self.moe_router_group_score_topk,
            prefix="moe_router_",
        )

    def _check_balancing(self) -> None:
        kinds, coeff = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        allowed: tuple[str, ...] = AUX_LOSSES if isinstance(kinds, tuple) else BALANCING_TYPES
        if not self.balancing_types or any(kind not in allowed for kind in self.balancing_types):
            form = "a tuple of" if isinstance(kinds, tuple) else "one of"
            raise ValueError(
                f"moe_router_load_balancing_type ({kinds!r}) must be {form} {', '.join(map(repr, allowed))}."
            )
        if len(set(self.balancing_types)) < len(self.balancing_types):
            raise ValueError(f"moe_router_load_balancing_type ({kinds!r}) must name each loss once.")
        if isinstance(kinds, tuple) != isinstance(coeff, tuple) or (
            isinstance(coeff, tuple) and len(coeff) != len(self.balancing_types)
        ):
            raise ValueError(
                f"moe_aux_loss_coeff ({coeff!r}) must have one number for each loss of moe_router_load_balancing_type"
                f" ({kinds!r}): two lists of one length, or neither a list."
            )
        for name, values in (("moe_aux_loss_coeff", coeff), ("moe_z_loss_coeff", self.moe_z_loss_coeff)):
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                    raise ValueError(f"{name} ({values!r}) must be 0 (off) or a positive, finite number.")
        if coeff and kinds in BALANCING_TYPES and kinds not in AUX_LOSSES:
            raise ValueError(
                f"moe_aux_loss_coeff ({coeff}) has no effect with moe_router_load_balancing_type ({kinds!r}); set the"
                " type to 'aux_loss' or the coefficient to 0."
            )
        if kinds != "quantile_balancing":
            self._refuse("it belongs to quantile_balancing", "moe_router_quantile_balancing_ema")
        if not self.moe_router_enable_expert_bias:
            self._refuse("there is no moe_router_enable_expert_bias", "moe_router_bias_update_rate")
        if kinds == "sinkhorn":
            self._refuse("sinkhorn weighs tokens in its own way", *_SCORE_OPTIONS, *_GROUP_OPTIONS, "moe_router_fusion")
        if kinds == "quantile_balancing":
            bias = "moe_router_enable_expert_bias"
            self._refuse("quantile_balancing chooses by its own bias", *_GROUP_OPTIONS, bias, "moe_router_fusion")
            if self.moe_router_topk >= self.num_router_experts:
                raise ValueError(
                    f"moe_router_topk ({self.moe_router_topk}) must be below the number of experts"
                    f" ({self.num_router_experts}) with quantile_balancing, which needs a first expert not chosen."
                )

    def _check_capacity(self) -> None:
        if self.moe_token_rounding_policy is None:
            self._refuse("there is no moe_token_rounding_policy", "moe_token_rounding_multiple")
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            raise ValueError(
                "moe_pad_expert_input_to_capacity (True) needs a capacity; set moe_expert_capacity_factor, for"
                " example to 1.0."
            )
        if self.moe_expert_capacity_tokens is not None:
            if self.moe_expert_capacity_factor is None:
                raise ValueError(
                    f"moe_expert_capacity_tokens ({self.moe_expert_capacity_tokens}) has no effect without"
                    " moe_expert_capacity_factor; set that or leave the tokens out."
                )
            check_positive(self, "moe_expert_capacity_tokens")
        if self.moe_expert_capacity_factor is None and self.moe_token_drop_policy != "probs":
            raise ValueError(
                f"moe_token_drop_policy ({self.moe_token_drop_policy!r}) has no effect without"
                " moe_expert_capacity_factor; set that or leave the policy out."
            )
        if self.moe_expert_capacity_factor is not None and self.moe_token_rounding_policy is not None:
            raise ValueError(
                f"moe_token_rounding_policy ({self.moe_token_rounding_policy!r}) and moe_expert_capacity_factor"
                f" ({self.moe_expert_capacity_factor}) both set the counts of experts; choose one of them."
            )

    def _check_other_routers(self) -> None:
        if self.moe_router_type == "expert_choice":
            if self.balancing_types not in (("aux_loss",), ("none",)) or self.aux_loss_coeffs:
                raise ValueError(
                    f"moe_router_load_balancing_type ({self.moe_router_load_balancing_type!r}) has no effect with"
                    " moe_router_type 'expert_choice', whose load is equal by construction; set it to 'none'."
                )
            why, forced = "in expert_choice each expert takes its best tokens", "moe_router_force_load_balancing"
            others = ("moe_router_pre_softmax", "moe_router_fusion", "moe_token_rounding_policy", forced)
            self._refuse(why, "moe_token_drop_policy")
            bias, pad = "moe_router_enable_expert_bias", "moe_pad_expert_input_to_capacity"
            self._refuse(why, *_GROUP_OPTIONS, *others, bias, pad)
            if self.num_zero_experts:
                raise ValueError(f"Zero-computation experts ({self.num_zero_experts}) need moe_router_type 'topk'.")
        if self.num_zero_experts:
            why = "zero-computation experts have no group, no capacity and no tiles"
            limits = ("moe_expert_capacity_factor", "moe_token_rounding_policy", "moe_router_force_load_balancing")
            self._refuse(why, *_GROUP_OPTIONS, *limits)

    def _refuse(self, why: str, *names: str) -> None:
        """Raise ValueError unless the named fields, which mean nothing here, have their defaults."""
        defaults = {field.name: field.default for field in fields(RouterConfig)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} ({getattr(self, name)!r}) has no meaning: {why}; leave it out.")


_GROUP_OPTIONS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
_SCORE_OPTIONS = (
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
)


def check_groups(
    topk: int,
    num_experts: int,
    num_groups: int | None,
    group_topk: int | None,
    group_score_topk: int | None,
    prefix: str = "",
) -> None:
    """Raise ValueError unless group-limited top-k is possible, or not asked for.

    Args:
        topk: experts per token.
        num_experts: E.
        num_groups: equal groups of neighbouring experts, or None.
        group_topk: groups that a token may choose from, or None.
        group_score_topk: experts of a group whose scores are summed; None: topk // group_topk.
        prefix: what the names have in front of them where the caller gave them.
    """
    if group_topk is None:
        for name, value in (("num_groups", num_groups), ("group_score_topk", group_score_topk)):
            if value is not None:
                raise ValueError(
                    f"{prefix}{name} ({value}) has no effect without {prefix}group_topk; set that or leave it out."
                )
        return
    if num_groups is None:
        raise ValueError(
            f"{prefix}group_topk ({group_topk}) needs {prefix}num_groups, the number of groups of experts."
        )
    if num_experts % num_groups:
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"{prefix}num_groups ({num_groups}) must divide the number of experts ({num_experts}): one of {divisors}."
        )
    if group_topk > num_groups:
        raise ValueError(f"{prefix}group_topk ({group_topk}) must not exceed {prefix}num_groups ({num_groups}).")
    group_size = num_experts // num_groups
    if topk > group_topk * group_size:
        raise ValueError(
            f"{prefix}topk ({topk}) must not exceed the experts in {prefix}group_topk ({group_topk}) groups of"
            f" {group_size}."
        )
    if group_score_topk is None and topk < group_topk:
        raise ValueError(
            f"{prefix}group_topk ({group_topk}) must not exceed {prefix}topk ({topk}): a group's score sums its best"
            f" topk // group_topk experts. Or set {prefix}group_score_topk."
        )
    num_summed = group_score_topk or topk // group_topk
    if num_summed > group_size:
        raise ValueError(
            f"{prefix}group_score_topk ({num_summed}) must not exceed the {group_size} experts of a group."
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


def check_positive_or_none(config: Any, name: str) -> None:
    """Raise ValueError unless the named field is None or what `check_positive` takes."""
    if getattr(config, name) is not None:
        check_positive(config, name)
