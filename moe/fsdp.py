"""FSDP2 for models of this library: dense parameters over DP x CP, expert parameters over EDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from moe.block import MoETransformerBlock
from moe.parallel import ProcessGroups, check_same_layout, local_tensor


def apply_fsdp(
    model: nn.Module,
    groups: ProcessGroups,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard parameters, gradients and optimizer state with FSDP2, and return the same model.

    Each block's experts are one unit over edp, the rest of the block one over dp_cp, what remains another. Experts are
    cut along their own dimension where it is long enough, else along H. A rank keeps its shard, and has one unit whole
    at a time: before its forward and again before its backward.

    FSDP2 sums gradients and divides by nothing: `finalize_gradients` scales them, and sums what is left to sum. Build
    the optimizer after this. Backwards of several micro-batches add up in the sharded gradients.

    Args:
        model: built with `groups`; also a MoELayer, or a module with blocks anywhere inside. Its modules with
            `expert_parallel = True` are experts. On the meta device it gets its values here, one unit at a time.
        groups: what `ProcessGroups.build` returned, under torch.distributed.
        param_dtype: of parameters in forward and backward, for example bfloat16 over fp32 masters; None: their own.
        reduce_dtype: gradients are summed in it; None: fp32, or fp64 for fp64 parameters.
        reshard_after_forward: False keeps each unit whole until its backward: one all_gather less.

    Raises:
        ValueError: torch.distributed is not initialised; parameters of 8 bits; a model that is sharded already, or
            built with groups of another layout.

    Collectives: none here. FSDP2's own in forward and backward are not in groups.counter.

    Source: torch.distributed.fsdp.fully_shard.
    """
    if groups.mesh is None:
        raise ValueError("apply_fsdp needs torch.distributed: start with torchrun, and build groups after that.")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _check_can_shard(model)
    check_same_layout(model, groups)
    has_fp64 = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    reduce_dtype = reduce_dtype or (torch.float64 if has_fp64 else torch.float32)
    dense: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "mesh": groups.dp_cp_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype),
    }
    expert = dense | {
        "mesh": groups.expert_mesh["edp"],
        # Experts get tokens in the dtype of the model and probs in fp32, which must stay.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False),
        "shard_placement_fn": partial(_shard_of_experts, num_shards=groups.edp.size()),
    }
    device = torch.device(groups.mesh.device_type)
    experts = [module for module in model.modules() if getattr(module, "expert_parallel", False)]
    blocks = [module for module in model.modules() if isinstance(module, MoETransformerBlock) and module is not model]
    for module in dict.fromkeys((*experts, *blocks, model)):
        _materialize(module, model, device)
        fully_shard(module, **(expert if module in experts else dense))
    _divide_by_nothing(model)
    return model


def _divide_by_nothing(model: nn.Module) -> None:
    """Let FSDP2 sum gradients as they are."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def _check_can_shard(model: nn.Module) -> None:
    """Raise ValueError for a model that is sharded already, or whose weights are stored in 8 bits."""
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("apply_fsdp was applied to this model or a part of it before; once is enough.")
    if any(parameter.itemsize == 1 for parameter in model.parameters()):
        raise ValueError(
            "fp8_param (True) is not available with apply_fsdp: gradients of FP8 weights bypass autograd; leave it out."
        )


def _shard_of_experts(parameter: nn.Parameter, num_shards: int) -> Any:
    """Return how a parameter [L, ...] of experts is cut: along L, or along H where L is too short and H divides.

    H is dimension 3 of fc1's weight [L, G, F, H] and 1 of fc2's [L, H, F]; ETP has cut F.
    """
    from torch.distributed.tensor import Shard

    local = local_tensor(parameter)
    dim = 3 if local.ndim == 4 else 1
    is_cut_along_h = num_shards > local.shape[0] and local.ndim > 2 and local.shape[dim] % num_shards == 0
    return Shard(dim) if is_cut_along_h else Shard(0)


@torch.no_grad()
def _materialize(module: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device storage and initial values, inner modules first.

    A model with `reset_parameters` draws torch's own modules there, so they draw nothing: values do not depend on TP.
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = {part for unit in module.modules() if isinstance(unit, FSDPModule) for part in unit.modules()}
    parts = [part for part in module.modules() if part not in sharded]
    is_meta = False
    for part in parts:
        if any(tensor.is_meta for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            part.to_empty(device=device, recurse=False)
            is_meta = True
    if not is_meta:
        return
    for part in reversed(parts):
        is_left_to_the_model = type(part) in (nn.Linear, nn.Embedding) and hasattr(model, "reset_parameters")
        if hasattr(part, "reset_parameters") and not is_left_to_the_model:
            part.reset_parameters()  # type: ignore[operator]  # a method, not a buffer
