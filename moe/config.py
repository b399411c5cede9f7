"""MoEConfig, the settings of a MoE layer, and TransformerConfig, those of a model built from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from dispatchers.config import DispatcherConfig
from moe.activations import Activation, ActivationName
from moe.backends import check_backend, check_width
from moe.presets import preset_fields
from moe.quantization.recipes import FP4_RECIPES, FP8_RECIPES, RECIPES, QuantizationRecipe
from moe.quantization.stored import FirstGemm
from router.config import RouterConfig, check_choice, check_positive

MAX_MARGIN = 8  # powers of two; with more, most values of E4M3 would round to 0
FP8RecipeName = Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
Config = TypeVar("Config", bound="MoEConfig")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Settings of the experts and of the shared expert, under Megatron-Core's field names.

    Raises:
        ValueError: a value out of range, or fields that contradict each other.
    """

    moe_ffn_hidden_size: int  # F, width of one expert over all expert-tensor-parallel ranks
    gated_linear_unit: bool = True  # phi(gate) * up; Megatron's default is False, published MoE models are gated
    activation_func: ActivationName = "silu"  # phi; with gated_linear_unit: SwiGLU. Megatron's default is "gelu"
    glu_linear_offset: float = 0.0  # added to up
    activation_func_clamp_value: float | None = None  # gate <= c, |up| <= c; None: no clamp
    moe_shared_expert_intermediate_size: int | None = None  # width of the shared expert; None: there is none
    moe_shared_expert_overlap: bool = False  # compute the shared expert while tokens travel to their experts
    moe_shared_expert_gate: bool = False  # the shared expert's output times sigmoid(x @ gate_weight^T)
    moe_latent_size: int | None = None  # experts work on tokens projected to this width; None: on H itself
    moe_layer_recompute: bool = False  # recompute dispatch, experts and combine in backward; the router runs once
    moe_recompute: Literal["activation", "mlp"] | None = None  # what experts compute again in backward: docs/memory.md

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        check_positive(self, "moe_ffn_hidden_size")
        for name in ("moe_shared_expert_intermediate_size", "moe_latent_size"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        for name, does in (("moe_shared_expert_gate", "gates"), ("moe_shared_expert_overlap", "overlaps")):
            if getattr(self, name) and self.moe_shared_expert_intermediate_size is None:
                raise ValueError(
                    f"{name} (True) {does} the shared expert, but moe_shared_expert_intermediate_size (None) says there"
                    " is none; set the size or leave it off."
                )
        check_choice(self, "moe_recompute", (None, "activation", "mlp"))
        if self.moe_recompute is not None and self.moe_layer_recompute:
            raise ValueError(
                f"moe_recompute ({self.moe_recompute!r}) is part of moe_layer_recompute (True); leave one out."
            )
        _ = self.activation

    @property
    def activation(self) -> Activation:
        """The activation object of experts, shared expert and dense MLPs."""
        return Activation(
            name=self.activation_func,
            gated=self.gated_linear_unit,
            offset=self.glu_linear_offset,
            clamp=self.activation_func_clamp_value,
        )


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Settings of quantization, under Megatron-Core's field names. The experts alone compute in FP8 or FP4.

    Raises:
        ValueError: an unknown recipe, a setting without effect, or settings that contradict each other.
    """

    fp8: Literal["hybrid", "e4m3"] | None = None  # experts in FP8: gradients in E5M2 or E4M3; None: in params_dtype
    fp8_recipe: FP8RecipeName = "delayed"  # see the table of recipes; Megatron's default
    fp8_margin: int = 0  # delayed: scales leave this many powers of two of room
    fp8_amax_history_len: int = 1  # delayed: steps that a scale remembers
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"  # delayed: which of them the scale follows
    fp8_wgrad: bool = True  # False: weight gradients multiply unquantized operands
    fp8_scale_format: Literal["fp32", "pow2"] | None = None  # None: the recipe's; powers of two lose less when repeated
    fp8_param: bool = False  # keep expert weights in FP8, fp32 masters in the optimizer (keep_master_weights)
    fp4: Literal["e2m1"] | None = None  # experts in FP4; excludes fp8
    fp4_recipe: Literal["nvfp4"] = "nvfp4"  # see the table of recipes
    activation_func_fp8_input_store: bool = False  # keep the activation's input in FP8 until backward
    moe_router_padding_for_quantization: bool = False  # pad the routing map to the recipe's row multiple
    moe_permute_fusion: bool = False  # pad the map by a Triton kernel on GPUs; permuting is an index anyway
    moe_expert_backend: Literal["reference", "torch", "te"] = "reference"  # who multiplies: see the table of backends

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        check_choice(self, "fp8", (None, "hybrid", "e4m3"))
        check_choice(self, "fp8_recipe", FP8_RECIPES)
        check_choice(self, "fp8_amax_compute_algo", ("most_recent", "max"))
        check_choice(self, "fp8_scale_format", (None, "fp32", "pow2"))
        check_choice(self, "fp4", (None, "e2m1"))
        check_choice(self, "fp4_recipe", FP4_RECIPES)
        check_choice(self, "moe_expert_backend", ("reference", "torch", "te"))
        check_positive(self, "fp8_amax_history_len")
        if type(self.fp8_margin) is not int or not 0 <= self.fp8_margin <= MAX_MARGIN:
            raise ValueError(f"fp8_margin ({self.fp8_margin!r}) must be an int from 0 to {MAX_MARGIN}.")
        if self.fp8 is not None and self.fp4 is not None:
            raise ValueError(f"fp8 ({self.fp8!r}) and fp4 ({self.fp4!r}) exclude each other; leave one out.")
        self._check_effect()
        self._check_primary_weights()
        check_backend(self)

    def _check_effect(self) -> None:
        """Raise ValueError for a setting that would change nothing."""
        if self.fp8_recipe != "delayed" and self.fp8 is None and not self.moe_router_padding_for_quantization:
            raise ValueError(
                f"fp8_recipe ({self.fp8_recipe!r}) has no effect without fp8 or moe_router_padding_for_quantization;"
                " set one of them or leave the recipe out."
            )
        for name, off in (("fp8_margin", 0), ("fp8_amax_history_len", 1), ("fp8_amax_compute_algo", "most_recent")):
            if getattr(self, name) != off and self.quantization_name != "delayed":
                raise ValueError(
                    f"{name} ({getattr(self, name)!r}) belongs to fp8 with fp8_recipe 'delayed', but the experts"
                    f" compute in {self.quantization_name or 'params_dtype'}; leave it out."
                )
        for name, off in (("fp8_wgrad", True), ("fp8_param", False)):
            if getattr(self, name) != off and self.fp8 is None:
                raise ValueError(f"{name} ({getattr(self, name)}) has no effect without fp8; set fp8 or leave it out.")
        if self.fp8_scale_format is not None and (
            self.fp8 is None or RECIPES[self.fp8_recipe].scale_format not in ("fp32", "pow2")
        ):
            raise ValueError(
                f"fp8_scale_format ({self.fp8_scale_format!r}) belongs to fp8 with a recipe whose scales are fp32"
                f" numbers, not to {self.quantization_name or 'params_dtype'}; leave it out."
            )

    def _check_primary_weights(self) -> None:
        """Raise ValueError for fp8_param with a recipe that needs a weight quantized in two ways."""
        has_one = [name for name in FP8_RECIPES if RECIPES[name].weight_block == RECIPES[name].weight_block.t]
        if self.fp8_param and self.fp8_recipe not in has_one:
            raise ValueError(
                f"fp8_param (True) is not available with fp8_recipe {self.fp8_recipe!r}: forward and backward read a"
                " weight with other scales each, so that one byte a value cannot serve both; recipes that can:"
                f" {has_one}."
            )

    @property
    def quantization_name(self) -> str | None:
        """The recipe by which experts compute; None in params_dtype."""
        if self.fp4 is not None:
            return self.fp4_recipe
        return self.fp8_recipe if self.fp8 is not None else None

    @property
    def quantization(self) -> QuantizationRecipe | None:
        """Its row of the table, with fp8_scale_format."""
        if self.quantization_name is None:
            return None
        recipe = RECIPES[self.quantization_name]
        return recipe if self.fp8_scale_format is None else replace(recipe, scale_format=self.fp8_scale_format)

    @property
    def pad_multiple(self) -> int:
        """Slots of every non-empty expert are a multiple of this; 1 without quantization and padding for it."""
        if self.quantization is not None:
            return self.quantization.row_multiple
        return RECIPES[self.fp8_recipe].row_multiple if self.moe_router_padding_for_quantization else 1


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RouterConfig, DispatcherConfig, ExpertsConfig, QuantizationConfig):
    """All settings of a MoE layer, flat, under Megatron-Core's field names; checked at construction.

    Raises:
        ValueError: a value out of range, or fields that contradict each other.
    """

    @classmethod
    def preset(cls: type[Config], name: str, **overrides: Any) -> Config:
        """Return the settings of a published model's MoE layer.

        Args:
            name: "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss" or "glm4_moe".
            overrides: fields that differ from the published ones, for example smaller sizes.

        Raises:
            ValueError: an unknown name, or a value that does not fit the rest. Groups, topk and the width of a shared
                expert are published ones too: a small layer overrides them.
            TypeError: an override that is no field.
        """
        return cls(**{**preset_fields(name), **overrides})

    def __post_init__(self) -> None:
        """Run the checks of every part."""
        RouterConfig.__post_init__(self)
        DispatcherConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)
        QuantizationConfig.__post_init__(self)
        if self.moe_recompute == "mlp" and self.activation_func_fp8_input_store:
            raise ValueError(
                "activation_func_fp8_input_store (True) keeps what moe_recompute ('mlp') computes again; leave one out."
            )
        if self.quantization is not None:
            self._check_quantized_sizes(self.quantization)
        if self.moe_deterministic and self.moe_expert_backend != "reference":
            raise ValueError(
                f"moe_deterministic (True) is not available with moe_expert_backend {self.moe_expert_backend!r},"
                " whose products round differently for other numbers of rows; use 'reference'."
            )
        if self.has_static_shapes:
            for name, off in (("moe_dispatch_num_chunks", 1), ("moe_deterministic", False)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"{name} ({getattr(self, name)}) is not available with moe_pad_expert_input_to_capacity (True)"
                        " and moe_token_dispatcher_type 'alltoall', whose shapes are static; leave one of them out."
                    )

    def _check_quantized_sizes(self, recipe: QuantizationRecipe) -> None:
        """Raise ValueError for widths that blocks do not divide, and for what quantized experts do not have."""
        sizes = {"moe_ffn_hidden_size": self.moe_ffn_hidden_size}
        sizes["moe_latent_size" if self.moe_latent_size else "hidden_size"] = self.expert_hidden_size
        for name, size in sizes.items():
            check_width(name, size, recipe.width_multiple, f"recipe {self.quantization_name!r}")
        if self.moe_deterministic:
            raise ValueError(
                f"moe_deterministic (True) is not available with quantized experts ({self.quantization_name!r}): it"
                " promises results that do not depend on how rows are cut into tiles, and scales do; leave one out."
            )

    @property
    def first_gemm(self) -> FirstGemm:
        """What happens to the first GEMM's output between forward and backward."""
        if self.moe_recompute == "mlp":
            return "recompute"
        return "fp8" if self.activation_func_fp8_input_store else "keep"

    @property
    def has_static_shapes(self) -> bool:
        """Whether tokens are dispatched in capacity mode: equal splits, no host sync."""
        return self.moe_pad_expert_input_to_capacity and self.dispatcher_name == "alltoall"

    @property
    def expert_hidden_size(self) -> int:
        """Width of the tokens that experts see: moe_latent_size, or hidden_size without it."""
        return self.moe_latent_size or self.hidden_size


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(MoEConfig):
    """A decoder-only model of MoE transformer blocks, under Megatron-Core's field names.

    Raises:
        ValueError: a value out of range, or sizes that do not divide.
    """

    num_layers: int  # transformer blocks
    num_attention_heads: int  # query heads
    vocab_size: int  # token ids, 256 for bytes
    num_query_groups: int | None = None  # key/value heads (grouped-query attention); None: one per query head
    kv_channels: int | None = None  # width of a head; None: hidden_size / num_attention_heads
    ffn_hidden_size: int | None = None  # width of a dense block's MLP; None: 4 * hidden_size
    first_last_layers_bf16: bool = False  # the first and last blocks' experts in params_dtype, the others quantized
    num_layers_at_start_in_bf16: int = 1  # with first_last_layers_bf16: blocks at the start
    num_layers_at_end_in_bf16: int = 1  # with first_last_layers_bf16: blocks at the end
    moe_layer_freq: int | tuple[int, ...] = 1  # n: blocks 0, n, 2n, .. are MoE; or a 1 (MoE) or 0 (dense) per block
    rotary_base: float = 10000.0  # theta of the rotary embedding
    layernorm_epsilon: float = 1e-5  # inside the root of RMSNorm
    sequence_parallel: bool = False  # ranks of TP hold slices of the sequence outside attention; TP > 1 needs it

    def __post_init__(self) -> None:
        """Run the checks of the layer, then those of the model."""
        super().__post_init__()
        check_positive(self, "num_layers", "num_attention_heads", "vocab_size", "rotary_base", "layernorm_epsilon")
        for name in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.kv_channels is None and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be divisible by num_attention_heads ({heads}); or set"
                " kv_channels."
            )
        if self.head_size % 2:
            raise ValueError(f"The width of a head ({self.head_size}) must be even for the rotary embedding.")
        if groups is not None and heads % groups:
            raise ValueError(f"num_attention_heads ({heads}) must be divisible by num_query_groups ({groups}).")
        self._check_unquantized_blocks()
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            check_positive(self, "moe_layer_freq")
        elif not isinstance(freq, tuple) or len(freq) != self.num_layers or any(kind not in (0, 1) for kind in freq):
            raise ValueError(
                f"moe_layer_freq ({freq!r}) must be a positive int, or a tuple of a 0 or 1 for each of num_layers"
                f" ({self.num_layers})."
            )

    def _check_unquantized_blocks(self) -> None:
        """Raise ValueError unless the blocks at both ends that stay in params_dtype are there, and quantized else."""
        ends = {name: getattr(self, name) for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
        if not self.first_last_layers_bf16:
            for name, number in ends.items():
                if number != 1:
                    raise ValueError(f"{name} ({number}) belongs to first_last_layers_bf16 (False); set it too.")
            return
        if self.quantization is None:
            raise ValueError("first_last_layers_bf16 (True) has no effect without fp8 or fp4; leave it out.")
        for name, number in ends.items():
            if type(number) is not int or not 0 <= number <= self.num_layers:
                raise ValueError(f"{name} ({number!r}) must be an int from 0 to num_layers ({self.num_layers}).")

    def of_block(self, index: int) -> TransformerConfig:
        """Return the settings of block `index` (from 0): these, or unquantized ones by first_last_layers_bf16."""
        start, end = self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16
        if not self.first_last_layers_bf16 or start <= index < end:
            return self
        kept = ("moe_router_padding_for_quantization", "moe_expert_backend", "activation_func_fp8_input_store")
        changes: dict[str, Any] = {f.name: f.default for f in fields(QuantizationConfig) if f.name not in kept}
        if self.moe_router_padding_for_quantization:
            changes["fp8_recipe"] = self.fp8_recipe
        changes |= {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1, "first_last_layers_bf16": False}
        return replace(self, **changes)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def is_moe_layer(self, index: int) -> bool:
        """Return whether block `index` (from 0) has experts; else it has a dense MLP."""
        freq = self.moe_layer_freq
        return index % freq == 0 if isinstance(freq, int) else freq[index] == 1
