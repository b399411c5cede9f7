"""Who multiplies the experts' matrices: the table of backends, and what each takes."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

from moe.quantization.recipes import RECIPES

# Looked up when it is asked for: a backend's file imports its library.
BACKENDS = {
    "reference": "moe.grouped_experts:reference_experts",
    "torch": "moe.grouped_experts:TorchExperts",
    "te": "moe.experts_te:TransformerEngineExperts",
}
LIBRARIES = {
    "te": (
        "Transformer Engine",
        "pip install --no-build-isolation 'transformer-engine[pytorch]' (the extra `te`), on a CUDA machine",
    )
}
ALIGNED_BYTES = 16  # rows that torch's grouped kernels take begin at multiples of this


class ExpertsBackend(Protocol):
    """Computes the experts of a GroupedMLP."""

    def __call__(self, tokens: Tensor, probs: Tensor, slots: Any, weights: Any, deferred: Any) -> Tensor:
        """Return [R, H] for tokens [R, H], probs [M], Slots, ExpertWeights and DeferredGradients or None."""

    def describe(self, weight: Tensor) -> str:
        """Return what multiplies matrices like this weight, in a few words."""


def build_backend(config: Any, experts: Any) -> ExpertsBackend:
    """Return the backend that a config names.

    Args:
        config: a MoEConfig.
        experts: the GroupedMLP that it belongs to.

    Raises:
        ImportError: its library is not installed.
    """
    name = config.moe_expert_backend
    module, attribute = BACKENDS[name].split(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        if name not in LIBRARIES:
            raise
        library, install = LIBRARIES[name]
        raise ImportError(
            f"moe_expert_backend ({name!r}) needs {library} ({error}): {install}; or choose 'reference', which needs"
            " nothing."
        ) from error
    return make(config, experts)


def check_backend(config: Any) -> None:
    """Raise ValueError for a setting of a QuantizationConfig that the backend does not take."""
    backend, name = config.moe_expert_backend, config.quantization_name
    if backend == "reference":
        return
    if config.fp8_param:
        _refuse("fp8_param", True, backend, "its weights are kept in params_dtype")
    if backend == "te":
        if name is not None and RECIPES[name].te_name is None:
            _refuse("fp8_recipe", name, backend, f"it has {_recipes_with('te_name')}")
        for field, off in (("fp8_wgrad", True), ("activation_func_fp8_input_store", False), ("fp8_scale_format", None)):
            if getattr(config, field) != off:
                _refuse(field, getattr(config, field), backend, "its own modules decide that")
        return
    if name is None:
        return
    if RECIPES[name].torch_capability is None:
        _refuse("recipe", name, backend, f"its kernels multiply {_recipes_with('torch_capability')}")
    if config.fp8 == "hybrid":
        _refuse("fp8", config.fp8, backend, "its kernels multiply E4M3 alone: set fp8='e4m3'")


def check_torch_widths(dtype: torch.dtype, widths: dict[str, int], backend: str = "torch") -> None:
    """Raise ValueError unless rows of these widths begin at multiples of 16 bytes."""
    for name, width in widths.items():
        check_width(name, width, ALIGNED_BYTES // dtype.itemsize, f"moe_expert_backend {backend!r} in {dtype}")


def check_width(name: str, width: int, multiple: int, who: str) -> None:
    """Raise ValueError unless a width is a multiple of what somebody asks for."""
    if width % multiple:
        lower = width // multiple * multiple
        nearest = [n for n in (lower, lower + multiple) if n]
        raise ValueError(
            f"{name} ({width}) must be divisible by {multiple} for {who}; the nearest such widths are {nearest}."
        )


def _refuse(field: str, value: object, backend: str, reason: str) -> None:
    raise ValueError(
        f"{field} ({value!r}) is not available with moe_expert_backend {backend!r}: {reason}; or use 'reference'."
    )


def _recipes_with(attribute: str) -> str:
    """Return the names of the recipes that have an attribute."""
    return ", ".join(name for name, recipe in RECIPES.items() if getattr(recipe, attribute) is not None)
