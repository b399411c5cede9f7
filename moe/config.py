"""MoEConfig, the settings of a MoE layer, and TransformerConfig, those of a model built from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dispatchers.config import DispatcherConfig
from moe.activations import Activation, ActivationName
from moe.presets import preset_fields
from moe.quantization.recipes import RECIPES
from router.config import RouterConfig, check_choice, check_positive

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
    """Settings of quantization, under Megatron-Core's field names.

    Raises:
        ValueError: fp8 compute, which this version does not have; an unknown recipe; a recipe without effect.
    """

    fp8: Literal["hybrid", "e4m3"] | None = None  # None: GEMMs in params_dtype; else refused in this version
    fp8_recipe: str = "delayed"  # its row multiple is what padding aims at; Megatron's default
    moe_router_padding_for_quantization: bool = False  # pad the routing map to the recipe's row multiple

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        if self.fp8 is not None:
            raise ValueError(
                f"fp8 ({self.fp8!r}, --fp8-format) is not available in this version: expert GEMMs run in params_dtype."
                " Leave it out; moe_router_padding_for_quantization (--moe-router-padding-for-quantization) works"
                " without it."
            )
        check_choice(self, "fp8_recipe", tuple(RECIPES))
        if self.fp8_recipe != "delayed" and not self.moe_router_padding_for_quantization:
            raise ValueError(
                f"fp8_recipe ({self.fp8_recipe!r}) has no effect without moe_router_padding_for_quantization; set that"
                " or leave the recipe out."
            )

    @property
    def pad_multiple(self) -> int:
        """Slots of every non-empty expert are a multiple of this; 1 without padding."""
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
        if self.has_static_shapes:
            for name, off in (("moe_dispatch_num_chunks", 1), ("moe_deterministic", False)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"{name} ({getattr(self, name)}) is not available with moe_pad_expert_input_to_capacity (True)"
                        " and moe_token_dispatcher_type 'alltoall', whose shapes are static; leave one of them out."
                    )

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
    moe_layer_freq: int | tuple[int, ...] = 1  # n: blocks 0, n, 2n, .. are MoE; or a 1 (MoE) or 0 (dense) per block
    rotary_base: float = 10000.0  # theta of the rotary embedding
    layernorm_epsilon: float = 1e-5  # inside the root of RMSNorm

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
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            check_positive(self, "moe_layer_freq")
        elif not isinstance(freq, tuple) or len(freq) != self.num_layers or any(kind not in (0, 1) for kind in freq):
            raise ValueError(
                f"moe_layer_freq ({freq!r}) must be a positive int, or a tuple of a 0 or 1 for each of num_layers"
                f" ({self.num_layers})."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def is_moe_layer(self, index: int) -> bool:
        """Return whether block `index` (from 0) has experts; else it has a dense MLP."""
        freq = self.moe_layer_freq
        return index % freq == 0 if isinstance(freq, int) else freq[index] == 1
