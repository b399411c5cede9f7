"""The rule that turns local gradients into those of the global objective, and the norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dispatchers.collectives import RankGroup, group_of_one
from moe.parallel import (
    ProcessGroups,
    check_same_layout,
    count_reduced,
    dense_parameters,
    expert_parameters,
    gradient_dtype,
    local_tensor,
    mesh_names,
    num_shards,
    sum_over_world,
)
from router.collectives import all_reduce_sum
from router.step import reset_global_aux_loss_tracker

BUCKET_ELEMENTS = 1 << 24


def finalize_gradients(
    model: nn.Module, groups: ProcessGroups, num_microbatches: int = 1, *, num_tokens: int | Tensor | None = None
) -> None:
    """Turn each rank's gradients into those of the global objective.

    Call it once per optimizer step, after the backward of every micro-batch. One rule for every scale:

    - By default a rank's loss is the mean over its own tokens, and the objective is the mean over data-parallel ranks
      and micro-batches. Dense gradients are averaged over DP x CP and summed over TP, whose ranks saw slices of the
      sequence. Expert gradients are summed over EDP and divided by the DP x CP size, not by the EDP size, because an
      expert has already summed the tokens of its EP group. Both are divided by num_microbatches.
    - With calculate_per_token_loss a rank's loss is the sum over its valid tokens, and the objective is that sum over
      all ranks and micro-batches divided by the number of those tokens: exact where counts differ. Dense gradients are
      summed over all ranks, expert gradients over EDP, and both are divided by that number.

    What was summed before is not summed again, and a parameter's mesh tells: FSDP2 (`apply_fsdp`) has summed over DP x
    CP or EDP, and the gradient of a parameter that is a DTensor over TP is whole.

    FSDP2's `set_requires_gradient_sync` must be True in the last backward of a step.

    Auxiliary losses have arranged for either. A parameter that got no gradient gets zeros, so that every rank takes
    part in every collective. The global batch of global_aux_loss ends here.

    Args:
        model: its parameters' `.grad` are overwritten.
        groups: the groups that the model was built with.
        num_microbatches: backward passes that were added up in `.grad`; without effect on per-token losses.
        num_tokens: with calculate_per_token_loss, the valid tokens of this rank's micro-batches, those in the slices
            of all its TP ranks together; else None.

    Raises:
        ValueError: groups of another layout than the model's; num_microbatches < 1; num_tokens missing with
            calculate_per_token_loss, or given without it.

    Collectives: with num_tokens an all_reduce of [] fp64 over dp_cp; all_reduce of dense gradients over tp_dp_cp,
        dp_cp (DTensors over TP) or tp (after FSDP2) and of expert gradients over edp (without FSDP2), in buckets and
        in fp32 (fp64 for fp64). No host sync.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches ({num_microbatches}) must be at least 1.")
    check_same_layout(model, groups)
    _check_num_tokens(model, num_tokens)
    scale: float | Tensor = 1.0 / (groups.dp_cp.size() * num_microbatches)
    dense, experts = dense_parameters(model), expert_parameters(model)
    if num_tokens is not None:
        device = next((p.device for p in (*dense, *experts)), None)
        counted = torch.as_tensor(num_tokens, dtype=torch.float64, device=device)
        total = all_reduce_sum(counted, group=groups.dp_cp, name="dp_cp", counter=groups.counter)
        scale = 1.0 / total.clamp(min=1)
    by_group: dict[str, list[nn.Parameter]] = {}
    for parameters, needed in ((dense, ("dp_cp", "tp")), (experts, ("edp",))):
        for parameter in parameters:
            done = mesh_names(parameter)
            by_group.setdefault("+".join(name for name in needed if name not in done), []).append(parameter)
    ranks = {"": group_of_one(), "dp_cp+tp": groups.tp_dp_cp, "dp_cp": groups.dp_cp, "tp": groups.tp, "edp": groups.edp}
    names = {"dp_cp+tp": "tp_dp_cp"}
    for key, parameters in sorted(by_group.items()):
        _sum_gradients(parameters, RankGroup(ranks[key], names.get(key, key), counter=groups.counter), scale)
    reset_global_aux_loss_tracker(model)


def _check_num_tokens(model: nn.Module, num_tokens: int | Tensor | None) -> None:
    """Raise ValueError unless num_tokens is given just where the configs of a model ask for per-token losses."""
    for name, module in model.named_modules():
        per_token = getattr(getattr(module, "config", None), "calculate_per_token_loss", num_tokens is not None)
        if per_token is not (num_tokens is not None):
            way_out = "pass this rank's count" if num_tokens is None else "set it, or leave num_tokens out"
            raise ValueError(
                f"num_tokens ({num_tokens}) belongs to calculate_per_token_loss ({per_token} in"
                f" {name or 'the model'}); {way_out}."
            )


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, groups: ProcessGroups) -> Tensor:
    """Scale all gradients so that their global norm is at most max_norm, and return the norm before.

    Args:
        model: its gradients must be final (`finalize_gradients`).
        max_norm: the largest norm allowed; float("inf") only measures.
        groups: the groups that the model was built with.

    Returns:
        [] fp64, equal on all ranks and to the norm on one rank. Each expert counts once, replicas do not add.

    Collectives: one all_reduce of [] fp64 over tp_dp_cp. No host sync.
    """
    world_size = groups.tp_dp_cp.size()
    found = [(p, local_tensor(p.grad)) for p in model.parameters() if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=found[0][1].device if found else None)
    for parameter, grad in found:
        square = torch.linalg.vector_norm(grad.float() if grad.itemsize < 4 else grad).double().square()
        total += square.to(total.device) / (world_size // num_shards(parameter))  # replicas have a share each
    norm = sum_over_world(total, groups).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in found:
        grad.mul_(scale.to(grad.device, grad.dtype if grad.dtype == torch.float64 else torch.float32))
    return norm


@torch.no_grad()
def _sum_gradients(parameters: Iterable[nn.Parameter], group: RankGroup, scale: float | Tensor) -> None:
    """Sum the gradients over the group and multiply by scale, in buckets of one dtype."""
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            if parameter.itemsize == 1:  # stored quantized: its gradient is fp32
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
        grad = local_tensor(parameter.grad)
        bucket = buckets.setdefault(grad.dtype, [])
        bucket.append(grad)
        if sum(g.numel() for g in bucket) >= BUCKET_ELEMENTS:
            _sum_bucket(buckets.pop(grad.dtype), group, scale)
    for bucket in buckets.values():
        _sum_bucket(bucket, group, scale)


def _sum_bucket(grads: list[Tensor], group: RankGroup, scale: float | Tensor) -> None:
    """Sum the gradients of one dtype over the group through one flat buffer, and scale them."""
    if group.size > 1:
        dtype = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([g.flatten().to(dtype) for g in grads]).mul_(_like(scale, grads[0]))
        count_reduced(group, "all_reduce gradients", flat)
        dist.all_reduce(flat, group=group.group)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    elif isinstance(scale, Tensor) or scale != 1.0:
        for grad in grads:
            grad.mul_(_like(scale, grad))


def _like(scale: float | Tensor, grad: Tensor) -> float | Tensor:
    """Return a scale that lies where the gradient does."""
    return scale.to(grad.device) if isinstance(scale, Tensor) else scale
