"""The backends of the experts that need PyTorch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.backends import ExpertsBackend, check_torch_widths
from moe.config import MoEConfig
from moe.deferred_gradients import DeferredGradients
from moe.expert_function import expert_mlp
from moe.expert_loop import Slots
from moe.expert_weights import ExpertWeights
from moe.gemm import describe_gemms
from moe.grouped_function import grouped_expert_mlp
from moe.quantization.grouped_gemm import GroupedGemm, ReferenceGemm
from moe.quantization.torch_gemm import GroupedMM, ScaledGroupedMM

if TYPE_CHECKING:
    from moe.experts import GroupedMLP


class LoopExperts:
    """Products expert by expert by `multiply_rows`, in `gemm_dtype`: any device, dtype and size."""

    def __init__(self, config: MoEConfig) -> None:
        self.activation, self.first_gemm = config.activation, config.first_gemm

    def __call__(
        self,
        tokens: Tensor,
        probs: Tensor,
        slots: Slots,
        weights: ExpertWeights,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        """See ExpertsBackend."""
        return expert_mlp(tokens, probs, slots, self.activation, weights, deferred, first_gemm=self.first_gemm)

    def describe(self, weight: Tensor) -> str:
        """See ExpertsBackend."""
        return describe_gemms(weight.dtype, weight.device)


class GroupedExperts:
    """All experts at once, with the products of a GroupedGemm; here those of the reference.

    Args:
        config: its recipe must not be None, but for a subclass.
        experts: whose scales and kept weights are used.
    """

    def __init__(self, config: MoEConfig, experts: GroupedMLP) -> None:
        self.config, self.experts = config, experts

    def __call__(
        self,
        tokens: Tensor,
        probs: Tensor,
        slots: Slots,
        weights: ExpertWeights,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        """See ExpertsBackend; the weights' gradients are never deferred."""
        return grouped_expert_mlp(
            tokens,
            probs,
            slots,
            self.config.activation,
            weights,
            self.gemm(tokens, slots.counts),
            self.experts.operands,
            first_gemm=self.config.first_gemm,
        )

    def gemm(self, tokens: Tensor, counts: tuple[int, ...]) -> GroupedGemm:
        """Return what multiplies the operands of experts with so many slots."""
        recipe = self.config.quantization
        if recipe is None:
            raise AssertionError("reference_experts takes a quantized config here")
        return ReferenceGemm(
            recipe,
            self.config.fp8,
            counts,
            tokens.dtype,
            self.config.fp8_wgrad,
            self.experts.delayed_scaling,
            records=self.experts.training and torch.is_grad_enabled(),
        )

    def describe(self, weight: Tensor) -> str:
        """See ExpertsBackend."""
        name, kind = self.config.quantization_name, self.config.fp8 or self.config.fp4
        return f"GEMMs {name} {kind}, rounded exactly and multiplied in fp32"


class TorchExperts(GroupedExperts):
    """All experts at once by torch's grouped kernels.

    Raises:
        ValueError: widths that the kernels do not take.
    """

    def __init__(self, config: MoEConfig, experts: GroupedMLP) -> None:
        super().__init__(config, experts)
        if config.params_dtype == torch.float64:
            raise ValueError(
                "params_dtype (torch.float64) must be torch.bfloat16, torch.float16 or torch.float32 for"
                " moe_expert_backend 'torch'; or use 'reference'."
            )
        local = experts.linear_fc2.local_weight()
        widths = {"hidden size of the experts": local.shape[1], "moe_ffn_hidden_size of a rank": local.shape[2]}
        check_torch_widths(config.params_dtype, widths)

    def gemm(self, tokens: Tensor, counts: tuple[int, ...]) -> GroupedGemm:
        """See GroupedExperts."""
        if self.config.quantization is None:
            return GroupedMM(counts)
        return ScaledGroupedMM(counts, self.config.quantization, self.config.fp8_wgrad)

    def describe(self, weight: Tensor) -> str:
        """See ExpertsBackend."""
        if self.config.quantization is None:
            return f"GEMMs {weight.dtype} by torch.nn.functional.grouped_mm"
        return f"GEMMs {self.config.quantization_name} {self.config.fp8} by torch.nn.functional.scaled_grouped_mm"


def reference_experts(config: MoEConfig, experts: GroupedMLP) -> ExpertsBackend:
    """Return the backend that runs anywhere: a loop over experts, or the exact emulation of a recipe."""
    return LoopExperts(config) if config.quantization is None else GroupedExperts(config, experts)
