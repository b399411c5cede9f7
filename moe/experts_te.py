"""The experts' backend on Transformer Engine's GroupedLinear, for CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe as te_recipes

from moe.config import MoEConfig
from moe.deferred_gradients import DeferredGradients
from moe.expert_loop import Slots
from moe.expert_weights import ExpertWeights
from moe.parallel import local_tensor
from moe.quantization.grouped_gemm import FC1, FC2
from moe.slots import add_slots, attached_zeros, gather_slots, weighted_activation
from router.gating import no_autocast

if TYPE_CHECKING:
    from moe.experts import GroupedMLP

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What says whether a device has a recipe. Entering a region whose recipe it lacks may leave Transformer Engine's global
# state changed, so it is asked first.
AVAILABILITY = {
    "tensorwise": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


class TransformerEngineExperts:
    """Rows gathered by slot, GroupedLinear, prob * activation, GroupedLinear, rows added up.

    The linears hold no weights of their own: each call lends them those of the GroupedMLP, so that parameters, their
    gradients and checkpoints are the same as with any backend. They do hold the scales of the delayed recipe: those
    follow each rank's own magnitudes, forward by forward, are not in checkpoints, and begin anew in a copy. Under
    `keep_quantized_weights` they hold the quantized weights from its first forward until the first one after it.

    Args:
        config: a MoEConfig.
        experts: the GroupedMLP that it belongs to.

    Raises:
        ValueError: a dtype, a recipe or a setting that Transformer Engine or the device does not take.
        RuntimeError: from Transformer Engine, without a CUDA device.
    """

    def __init__(self, config: MoEConfig, experts: GroupedMLP) -> None:
        _check_settings(config)
        self.config, self.operands = config, experts.operands
        self.sizes: tuple[int, ...] = tuple(local_tensor(experts.linear_fc2.weight).shape)  # L, H, F
        self._build()
        _check_available(config)

    def _build(self) -> None:
        """Make the linears and the recipe."""
        config, (num_local, hidden, ffn) = self.config, self.sizes
        # False: with grouped tensors counts would have to lie on the device, and other rules hold for them.
        common: dict[str, Any] = {"params_dtype": config.params_dtype, "device": "meta", "use_grouped_tensor": False}
        fc1_width = config.activation.num_inputs * ffn
        self.fc1 = te.GroupedLinear(num_local, hidden, fc1_width, bias=config.add_bias_linear, **common)
        # Its bias is multiplied by the slot's prob, and so added here.
        self.fc2 = te.GroupedLinear(num_local, ffn, hidden, bias=False, **common)
        self.recipe = _build_recipe(config)

    def __getstate__(self) -> tuple[Any, ...]:
        """Leave out the linears, whose state Transformer Engine knows by identity."""
        return self.config, self.operands, self.sizes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Make new linears."""
        self.config, self.operands, self.sizes = state
        self._build()

    def __call__(
        self, tokens: Tensor, probs: Tensor, slots: Slots, weights: ExpertWeights, deferred: DeferredGradients | None
    ) -> Tensor:
        """See ExpertsBackend; the weights' gradients are never deferred.

        Raises:
            ValueError: a weight of linear_fc1 that is frozen while its bias is not.

        Saved for backward: the slots' rows [M, H] and the second linear's input [M, F], both quantized under a recipe;
        the first linear's output [M, G, F], probs [M], row_ids [M]. With moe_recompute "activation" not the second
        linear's input, for which the second product runs again too; with "mlp" tokens, probs and row_ids alone, and
        both run again. No host sync.
        """
        fc1_bias = weights.fc1_bias
        if fc1_bias is not None and fc1_bias.requires_grad and not weights.fc1.requires_grad:
            raise ValueError(
                "linear_fc1.weight (requires_grad=False) must not be frozen while linear_fc1.bias is trained: with"
                " moe_expert_backend 'te' one product makes both gradients; freeze both, or use 'reference'."
            )
        if tokens.shape[0] == 0 or sum(slots.counts) == 0:
            return attached_zeros(tokens, probs, weights)
        again = self.config.moe_recompute
        arguments = tokens, probs, slots, weights, again == "activation"
        y = self._run(self._both, again == "mlp", *arguments)  # [M, H]
        with no_autocast(tokens.device):
            return add_slots(y, probs, weights.fc2_bias, slots, tokens.shape[0])  # [M, H] -> [R, H]

    def _run(self, function: Callable[..., Tensor], recomputes: bool, *args: Any) -> Tensor:
        """Run the function in a region; recomputes: keep its arguments alone until backward, and run it again then."""
        return (
            checkpoint(self._in_region, function, *args, use_reentrant=False)
            if recomputes
            else self._in_region(function, *args)
        )

    def _in_region(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run the function under the recipe. With delayed scales a linear may run once in each region."""
        region = nullcontext() if self.recipe is None else te.autocast(enabled=True, recipe=self.recipe)
        with no_autocast(args[0].device), region:
            return function(*args)

    def _both(
        self, tokens: Tensor, probs: Tensor, slots: Slots, weights: ExpertWeights, recomputes_activation: bool
    ) -> Tensor:
        """Both products and what lies before and between them: tokens [R, H], probs [M] -> [M, H]."""
        x = gather_slots(tokens, slots)  # [R, H] -> [M, H]
        first = self._multiply(FC1, x, slots.counts, weights.fc1, weights.fc1_bias)  # [M, G * F]
        first = first.unflatten(1, weights.fc1.shape[1:3])  # [M, G, F]
        if recomputes_activation:
            return self._run(self._second, True, first, probs, slots, weights)  # [M, H]
        return self._second(first, probs, slots, weights)

    def _second(self, first: Tensor, probs: Tensor, slots: Slots, weights: ExpertWeights) -> Tensor:
        """Activation and second product: first [M, G, F], probs [M] -> [M, H]."""
        hidden = weighted_activation(first, probs, self.config.activation)  # [M, F]
        return self._multiply(FC2, hidden, slots.counts, weights.fc2, None)

    def _multiply(self, index: int, x: Tensor, counts: tuple[int, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return each slot's row times its expert's weight, plus its bias.

        Args:
            index: which linear.
            x: [M, K].
            counts: slots of each expert.
            weight: [L, ..., K]; what is between is N.
            bias: [L, ...], N without K, or None.

        Returns:
            [M, N].
        """
        linear = (self.fc1, self.fc2)[index]
        is_first = None if self.recipe is None else self.operands.is_first_use(weight, index)
        if is_first is not False:
            linear._fp8_workspaces.clear()  # quantized weights of the last block
        lent = {f"weight{e}": matrix for e, matrix in enumerate(weight.contiguous().flatten(1, -2).unbind())}
        if bias is not None:
            lent |= {f"bias{e}": vector for e, vector in enumerate(bias.contiguous().flatten(1).unbind())}
        return functional_call(linear, lent, (x, list(counts)), {"is_first_microbatch": is_first})

    def describe(self, weight: Tensor) -> str:
        """See ExpertsBackend."""
        name = self.config.quantization_name
        what = weight.dtype if name is None else f"{name} {self.config.fp8 or self.config.fp4}"
        return f"GEMMs {what} by transformer_engine.pytorch.GroupedLinear"


def _check_settings(config: MoEConfig) -> None:
    """Raise ValueError for what GroupedLinear does not take on any device."""
    if config.params_dtype not in DTYPES:
        raise ValueError(
            f"params_dtype ({config.params_dtype}) must be one of {DTYPES} for moe_expert_backend 'te'; or use"
            " 'reference'."
        )
    recomputes = [name for name in ("moe_layer_recompute", "moe_recompute") if getattr(config, name)]
    if recomputes and config.quantization_name == "delayed":
        raise ValueError(
            f"{recomputes[0]} ({getattr(config, recomputes[0])!r}) is not available with fp8_recipe 'delayed' and"
            " moe_expert_backend 'te': the second forward would find other scales than the first; leave one out, or use"
            " 'reference'."
        )


def _check_available(config: MoEConfig) -> None:
    """Raise ValueError if the device does not have the recipe."""
    name = config.quantization_name
    if name is None:
        return
    is_available, reason = getattr(te, AVAILABILITY[name])(return_reason=True)
    if not is_available:
        field = "fp4_recipe" if config.fp8 is None else "fp8_recipe"
        raise ValueError(
            f"{field} ({name!r}) is not available on this device with moe_expert_backend 'te' ({reason}): choose"
            " another recipe, or 'reference'."
        )


def _build_recipe(config: MoEConfig) -> Any:
    """Return Transformer Engine's recipe, or None."""
    recipe = config.quantization
    if recipe is None or recipe.te_name is None:
        return None
    options: dict[str, Any] = {}
    if config.fp8 is not None:
        options["fp8_format"] = te_recipes.Format.HYBRID if config.fp8 == "hybrid" else te_recipes.Format.E4M3
    if not recipe.has_history:
        return getattr(te_recipes, recipe.te_name)(**options)
    return _LayerScaling(
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        reduce_amax=False,
        **options,
    )


class _LayerScaling(te_recipes.DelayedScaling):
    """The delayed recipe of one layer.

    When a region ends, Transformer Engine rolls the histories of all modules whose recipes print the same: those of
    other layers as well, unless each prints differently.
    """

    def __repr__(self) -> str:
        """Name the object."""
        return f"DelayedScaling of one layer at {id(self):#x}"
