"""GroupedMLP: this rank's experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dispatchers.base import DETERMINISTIC_ROWS, ExpertInput
from dispatchers.collectives import group_of_one
from moe.backends import build_backend, check_width
from moe.config import MoEConfig
from moe.deferred_gradients import DeferredGradients
from moe.expert_linear import ExpertLinear, QuantizedExpertLinear
from moe.expert_loop import Slots
from moe.expert_weights import ExpertWeights
from moe.parallel import ProcessGroups, local_box, local_tensor, mesh_names, shard_expert_parameter
from moe.quantization.delayed import DelayedScaling
from moe.quantization.formats import E4M3
from moe.quantization.recipes import QuantizationRecipe
from moe.quantization.weights import WeightOperands
from router.collectives import deepcopy_sharing_groups


class GroupedMLP(nn.Module):
    """E / ep_size experts, each linear_fc2(prob * activation(linear_fc1(x))) + prob * linear_fc2.bias.

    Initial values depend on torch's seed and the global expert index alone: every factoring of the ranks starts from
    the same model. With expert-tensor parallelism a rank holds a slice of F, and the output is this rank's addend; it
    adds fc2's bias to its own slice of H, so that the sum over the ranks has it once.

    Args:
        config: see MoEConfig.
        groups: process groups; None on one process.

    Attributes:
        linear_fc1.weight: [L, G, F, H] (G = 2, gate then up, for gated units, else 1). linear_fc1.bias: [L, G, F].
        linear_fc2.weight: [L, H, F]. linear_fc2.bias: [L, H].
        With several ranks these are DTensors of the global shapes [E, ...], sharded over (ep, etp).
        delayed_scaling: DelayedScaling with fp8_recipe "delayed", else None.
        operands: the quantized weights while they are kept; see `keep_quantized_weights`.
        backend: what computes; see moe_expert_backend.

    Raises:
        ValueError: num_moe_experts, moe_ffn_hidden_size or (with biases) the hidden size do not divide by the groups,
            or what is left of them does not suit the recipe or the backend.
        ImportError: a backend whose library is not installed.
    """

    expert_parallel = True

    def __init__(self, config: MoEConfig, groups: ProcessGroups | None = None) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        self.activation = config.activation
        ep = groups.ep if groups else group_of_one()
        self.etp_group = groups.etp if groups else group_of_one()
        etp_size, hidden, ffn = self.etp_group.size(), config.expert_hidden_size, config.moe_ffn_hidden_size
        _check_divides("num_moe_experts", config.num_moe_experts, "expert-parallel", ep.size())
        _check_divides("moe_ffn_hidden_size", ffn, "expert-tensor-parallel", etp_size)
        if config.add_bias_linear:
            _check_divides("hidden size of the experts", hidden, "expert-tensor-parallel", etp_size)
        if config.quantization is not None:
            _check_quantized_slice(config, config.quantization, etp_size)
        self.num_local_experts = config.num_moe_experts // ep.size()
        self.first_expert = ep.rank() * self.num_local_experts
        num_local, num_inputs = self.num_local_experts, self.activation.num_inputs
        self.linear_fc1 = self._linear((num_local, num_inputs, ffn // etp_size, hidden), etp_dim=2)
        self.linear_fc2 = self._linear((num_local, hidden, ffn // etp_size), etp_dim=2)
        history = config.fp8_amax_history_len, config.fp8_amax_compute_algo, config.fp8_margin
        has_history = config.quantization is not None and config.quantization.has_history
        self.delayed_scaling = DelayedScaling(num_local, groups, *history) if has_history else None
        linears = (self.linear_fc1, self.linear_fc2)
        self.reset_parameters()
        self.operands = WeightOperands([linear for linear in linears if isinstance(linear, QuantizedExpertLinear)])
        self.backend = build_backend(config, self)

    def _linear(self, shape: tuple[int, ...], etp_dim: int) -> ExpertLinear:
        """Return an uninitialised linear whose local weight has this shape."""
        dtype, sharded = self.config.params_dtype, self.groups is not None and self.groups.is_expert_sharded
        recipe = self.config.quantization if self.config.fp8_param else None
        weight = torch.empty(shape, dtype=dtype if recipe is None else E4M3.dtype)
        bias: Tensor | None = None
        if self.config.add_bias_linear:
            # fc1 [L, G, F]: F is sharded like the weight's. fc2 [L, H]: each rank adds its slice of H.
            bias_shape = shape[:-1] if len(shape) == 4 else (shape[0], shape[1] // self.etp_group.size())
            bias = torch.empty(bias_shape, dtype=dtype)
        if sharded and self.groups is not None:
            weight = shard_expert_parameter(weight, self.groups, etp_dim)
            bias = None if bias is None else shard_expert_parameter(bias, self.groups, bias.ndim - 1)
        if recipe is None:
            return ExpertLinear(weight, bias)
        return QuantizedExpertLinear(weight, bias, recipe, self.groups, etp_dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights from its own generator, seeded by torch's default one; zero the biases.

        On the meta device there is nothing to draw: call it again after `to_empty`.
        """
        seed = int(torch.randint(1 << 40, (), device="cpu"))  # sync: one number on the host, at construction
        if self.linear_fc1.weight.is_meta:
            return
        if self.delayed_scaling is not None:
            self.delayed_scaling.reset()
        for offset, linear in enumerate((self.linear_fc1, self.linear_fc2)):
            box = local_box(linear.weight)
            generator = torch.Generator(device=linear.weight.device)
            for index, expert in enumerate(range(box[0].start, box[0].stop)):
                generator.manual_seed(seed + 2 * expert + offset)
                values = torch.empty(linear.weight.shape[1:], dtype=torch.float32, device=linear.weight.device)
                values.normal_(std=self.config.init_method_std, generator=generator)
                linear.set_expert(index, values[box[1:]])
            if linear.bias is not None:
                local_tensor(linear.bias).zero_()

    __deepcopy__ = deepcopy_sharing_groups

    def deferred_gradients(self) -> DeferredGradients | None:
        """Return what takes over the weights' gradients of the forwards that get it: see DeferredGradients.

        None where the backend has no such thing: quantized experts, and all backends but the reference; and outside
        forward where FSDP2 holds the weights, which are whole in forward alone.
        """
        is_held_by_fsdp = "edp" in mesh_names(self.linear_fc1.weight)
        if self.config.quantization is not None or self.config.moe_expert_backend != "reference" or is_held_by_fsdp:
            return None
        return DeferredGradients(self._weights(), DETERMINISTIC_ROWS if self.config.moe_deterministic else None)

    def forward(self, expert_input: ExpertInput, deferred: DeferredGradients | None = None) -> Tensor:
        """Return for each row the sum over its slots.

        Args:
            expert_input: see ExpertInput; tokens [R, H] in the dtype of the weights.
            deferred: what `deferred_gradients` returned, the same for all parts of a dispatch; None: this forward
                stands alone.

        Returns:
            [R, H] in the dtype of tokens; under expert-tensor parallelism this rank's addend.

        Raises:
            ValueError: tokens of another dtype or width than the weights, or counts for another number of experts.

        Saved for backward: tokens [R, H], the first GEMM's output [M, G, F], row_ids [M], probs [M]; less with
        moe_recompute and with quantized experts, see docs/memory.md and docs/quantization.md. No host sync.
        """
        tokens = expert_input.tokens
        weight = local_tensor(self.linear_fc1.weight)
        dtype = tokens.dtype if self.config.fp8_param else weight.dtype  # quantized weights fit every dtype
        if tokens.dtype != dtype or tokens.shape[-1] != weight.shape[-1]:
            raise ValueError(
                f"tokens ({list(tokens.shape)}, {tokens.dtype}) must have the width {weight.shape[-1]} and the dtype of"
                f" the expert weights ({weight.dtype}); cast the module or its input."
            )
        if len(expert_input.tokens_per_expert_list) != self.num_local_experts:
            raise ValueError(
                f"tokens_per_expert_list ({len(expert_input.tokens_per_expert_list)} entries) must have one per local"
                f" expert ({self.num_local_experts})."
            )
        if self.config.moe_router_padding_for_quantization:
            is_padding = expert_input.probs == 0  # what a padded map added; it reads nothing, as slot padding does
            row_ids = expert_input.row_ids.masked_fill(is_padding, -1)
            expert_input = replace(expert_input, row_ids=row_ids, has_padding=True)
            if self.config.quantization is not None:
                expert_input = _padding_last(expert_input)
        slots = Slots(
            expert_input.tokens_per_expert_list,
            expert_input.row_ids,
            expert_input.has_padding,
            expert_input.tokens_per_source,
            expert_input.num_slots_list,
        )
        if deferred is None and self.config.moe_deterministic:
            deferred = self.deferred_gradients()
        weights = self._weights() if deferred is None else deferred.detached
        return self.backend(tokens, expert_input.probs, slots, weights, deferred)

    def _weights(self) -> ExpertWeights:
        """Return this rank's weights."""
        return ExpertWeights(
            local_tensor(self.linear_fc1.weight),
            local_tensor(self.linear_fc2.weight),
            None if self.linear_fc1.bias is None else local_tensor(self.linear_fc1.bias),
            self._whole_fc2_bias(),
        )

    def _whole_fc2_bias(self) -> Tensor | None:
        """fc2's bias over all of H: [L, H / etp_size] -> [L, H], zero outside this rank's slice."""
        if self.linear_fc2.bias is None:
            return None
        bias = local_tensor(self.linear_fc2.bias)
        if self.etp_group.size() == 1:
            return bias
        before = self.etp_group.rank() * bias.shape[1]
        return F.pad(bias, (before, self.config.expert_hidden_size - before - bias.shape[1]))

    def extra_repr(self) -> str:
        """Show what is computed when the module is printed."""
        weight = self.linear_fc1.weight
        return (
            f"local_experts={self.num_local_experts}, activation={self.activation}, parameters {weight.dtype},"
            f" {self.backend.describe(weight)}"
        )


def _padding_last(expert_input: ExpertInput) -> ExpertInput:
    """Bring padding behind each expert's other slots, so that blocks with one scale do not depend on where it lay."""
    counts, row_ids, probs = expert_input.tokens_per_expert, expert_input.row_ids, expert_input.probs
    experts = torch.arange(counts.shape[0], device=counts.device)
    expert_of = experts.repeat_interleave(counts, output_size=probs.shape[0])  # [M]
    order = (2 * expert_of + (row_ids < 0)).argsort(stable=True)
    return replace(expert_input, row_ids=row_ids.index_select(0, order), probs=probs.index_select(0, order))


def _check_quantized_slice(config: MoEConfig, recipe: QuantizationRecipe, etp_size: int) -> None:
    """Raise ValueError unless a rank's slice of an expert suits the recipe."""
    ffn, name = config.moe_ffn_hidden_size, config.quantization_name
    what = f"moe_ffn_hidden_size ({ffn}) / expert-tensor-parallel size ({etp_size})"
    check_width(what, ffn // etp_size, recipe.width_multiple, f"recipe {name!r}")
    if config.fp8_param and etp_size > 1 and recipe.weight_block.rows is None:
        raise ValueError(
            f"fp8_param (True) with fp8_recipe {name!r} needs expert-tensor-parallel size 1, not {etp_size}: a weight's"
            " one scale would belong to a slice; 'blockwise' can be sliced."
        )


def _check_divides(name: str, value: int, group_name: str, size: int) -> None:
    """Raise ValueError unless the size of a group divides the value."""
    if value % size:
        nearest = [n for n in (value // size * size, (value // size + 1) * size) if n]
        raise ValueError(
            f"{name} ({value}) must be divisible by the {group_name} size ({size}); the nearest such values are"
            f" {nearest}."
        )
