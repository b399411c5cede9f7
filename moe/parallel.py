"""Process groups with parallel folding, and the rule that turns local gradients into those of the global objective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dispatchers.accounting import CommunicationCounter
from dispatchers.collectives import RankGroup, group_of_one
from router.collectives import all_reduce_sum
from router.step import reset_global_aux_loss_tracker

BUCKET_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The process groups of one job. Attention and experts fold the same ranks in two ways.

    Rank order as in Megatron-Core: tp fastest, then cp, then dp; etp fastest, then ep, then edp.

    Attributes:
        tp, cp, dp: tensor-, context- and data-parallel ranks of the dense part.
        etp, ep, edp: tensor-, expert- and data-parallel ranks of the experts.
        tp_cp, dp_cp, tp_dp_cp, tp_ep: combined groups; tp_ep is etp x ep, tp_dp_cp is the world.
        mesh: DeviceMesh (dp, cp, tp), or None on one process.
        expert_mesh: DeviceMesh (edp, ep, etp) over the same ranks, or None on one process.
        counter: counts what this rank's collectives over these groups move, by operation and group.
    """

    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    edp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    tp_dp_cp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    mesh: Any = None
    expert_mesh: Any = None
    counter: CommunicationCounter = field(default_factory=CommunicationCounter)

    @classmethod
    def build(
        cls,
        expert_model_parallel_size: int = 1,
        expert_tensor_parallel_size: int = 1,
        tensor_model_parallel_size: int = 1,
        context_parallel_size: int = 1,
        device_type: str = "cpu",
    ) -> ProcessGroups:
        """Return the groups of this rank. Every rank calls it with the same sizes.

        Without an initialised torch.distributed there is one process, and every group has this one rank.

        Args:
            expert_model_parallel_size: EP, ranks that share out the experts.
            expert_tensor_parallel_size: ETP, ranks that share each expert.
            tensor_model_parallel_size: TP, ranks that hold sequence slices of the same micro-batch.
            context_parallel_size: CP, ranks that hold context slices of the same micro-batch.
            device_type: "cpu" or "cuda", where the meshes live.

        Raises:
            ValueError: a size below 1, or sizes that do not divide the number of ranks.

        Collectives: creates the groups; every rank takes part.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        tp, cp = tensor_model_parallel_size, context_parallel_size
        ep, etp = expert_model_parallel_size, expert_tensor_parallel_size
        _check_sizes(world_size, {"tensor_model_parallel_size": tp, "context_parallel_size": cp})
        _check_sizes(world_size, {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp})
        if not dist.is_initialized():
            alone = group_of_one()
            names = ("tp", "cp", "dp", "etp", "ep", "edp", "tp_cp", "dp_cp", "tp_dp_cp", "tp_ep")
            groups: dict[str, Any] = dict.fromkeys(names, alone)
            return cls(**groups)
        from torch.distributed.device_mesh import init_device_mesh

        world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
        mesh = world._unflatten(0, (world_size // (tp * cp), cp, tp), ("dp", "cp", "tp"))
        expert_mesh = world._unflatten(0, (world_size // (ep * etp), ep, etp), ("edp", "ep", "etp"))
        own: dict[str, Any] = {name: mesh.get_group(name) for name in ("tp", "cp", "dp")}
        own |= {name: expert_mesh.get_group(name) for name in ("etp", "ep", "edp")}
        return cls(
            **own,
            tp_cp=mesh["cp", "tp"]._flatten("tp_cp").get_group(),
            dp_cp=mesh["dp", "cp"]._flatten("dp_cp").get_group(),
            tp_dp_cp=world.get_group(),
            tp_ep=expert_mesh["ep", "etp"]._flatten("tp_ep").get_group(),
            mesh=mesh,
            expert_mesh=expert_mesh,
        )

    @property
    def is_expert_sharded(self) -> bool:
        """Whether expert parameters are spread over more than one rank."""
        return self.tp_ep.size() > 1


def _check_sizes(world_size: int, sizes: dict[str, int]) -> None:
    """Raise ValueError unless the product of the sizes divides the number of ranks."""
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1.")
        product *= size
    if world_size % product:
        formula = " x ".join(f"{name} ({size})" for name, size in sizes.items())
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"The number of ranks ({world_size}) must be divisible by {formula} = {product}; products that fit"
            f" {world_size} ranks: {divisors}."
        )


def shard_expert_parameter(local: Tensor, groups: ProcessGroups, etp_dim: int) -> Tensor:
    """Return this rank's part of an expert tensor as a DTensor that knows the global shape.

    Args:
        local: [L, ...], dimension 0 sharded over EP, dimension etp_dim over ETP.
        groups: with an expert mesh.
        etp_dim: the dimension that expert-tensor parallelism splits.

    Returns:
        DTensor [E, ...] over the (ep, etp) mesh; no communication.
    """
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(local, groups.expert_mesh["ep", "etp"], (Shard(0), Shard(etp_dim)), run_check=False)


def shard_expert_buffer(local: Tensor, groups: ProcessGroups | None) -> Tensor:
    """Return this rank's part [L, ...] of a tensor [E, ...] that ETP ranks hold alike, as a DTensor if E is sharded."""
    if groups is None or not groups.is_expert_sharded:
        return local
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(local, groups.expert_mesh["ep", "etp"], (Shard(0), Replicate()), run_check=False)


def max_over_replicas(values: Tensor, groups: ProcessGroups) -> Tensor:
    """Return the largest values over the ranks that hold the same experts or parts of them, in new storage.

    Collectives: one all_reduce (max) over edp, one over etp.
    """
    values = values.clone()
    for name, group in (("edp", groups.edp), ("etp", groups.etp)):
        if group.size() > 1:
            _count_reduced(RankGroup(group, name, counter=groups.counter), "all_reduce amax", values)
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, fp32 for one of 8 bits."""
    return torch.float32 if parameter.itemsize == 1 else parameter.dtype


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of every module that says `expert_parallel = True`: those sharded over experts."""
    found = {}
    for module in model.modules():
        if getattr(module, "expert_parallel", False):
            found.update({id(p): p for p in module.parameters()})
    return list(found.values())


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not expert parameters."""
    experts = {id(p) for p in expert_parameters(model)}
    return [p for p in model.parameters() if id(p) not in experts]


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

    Auxiliary losses have arranged for either. A parameter that got no gradient gets zeros, so that every rank takes
    part in every collective. The global batch of global_aux_loss ends here.

    Args:
        model: its parameters' `.grad` are overwritten.
        groups: the groups that the model was built with.
        num_microbatches: backward passes that were added up in `.grad`; without effect on per-token losses.
        num_tokens: this rank's valid tokens in all micro-batches, with calculate_per_token_loss; else None.

    Raises:
        ValueError: num_microbatches < 1; num_tokens missing with calculate_per_token_loss, or given without it.

    Collectives: with num_tokens an all_reduce of [] fp64 over tp_dp_cp; all_reduce of all dense gradients over
        tp_dp_cp and of all expert gradients over edp, in buckets and in fp32 (fp64 for fp64). No host sync.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches ({num_microbatches}) must be at least 1.")
    for name, module in model.named_modules():
        per_token = getattr(getattr(module, "config", None), "calculate_per_token_loss", num_tokens is not None)
        if per_token is not (num_tokens is not None):
            way_out = "pass this rank's count" if num_tokens is None else "set it, or leave num_tokens out"
            raise ValueError(
                f"num_tokens ({num_tokens}) belongs to calculate_per_token_loss ({per_token} in"
                f" {name or 'the model'}); {way_out}."
            )
    scale: float | Tensor = 1.0 / (groups.dp_cp.size() * num_microbatches)
    dense, experts = dense_parameters(model), expert_parameters(model)
    if num_tokens is not None:
        device = next((p.device for p in (*dense, *experts)), None)
        scale = 1.0 / sum_over_world(torch.as_tensor(num_tokens, dtype=torch.float64, device=device), groups).clamp(
            min=1
        )
    _sum_gradients(dense, RankGroup(groups.tp_dp_cp, "tp_dp_cp", counter=groups.counter), scale)
    _sum_gradients(experts, RankGroup(groups.edp, "edp", counter=groups.counter), scale)
    reset_global_aux_loss_tracker(model)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, groups: ProcessGroups) -> Tensor:
    """Scale all gradients so that their global norm is at most max_norm, and return the norm before.

    Args:
        model: its gradients must be final (`finalize_gradients`).
        max_norm: the largest norm allowed; float("inf") only measures.
        groups: the groups that the model was built with.

    Returns:
        [] fp64, equal on all ranks and to the norm on one rank. Each expert counts once, replicas do not add.

    Collectives: one all_reduce of [1] fp64 over tp_ep. No host sync.
    """
    dense, experts = (
        [local_tensor(p.grad) for p in parameters if p.grad is not None]
        for parameters in (dense_parameters(model), expert_parameters(model))
    )
    expert_square = _square_sum(experts)
    if groups.tp_ep.size() > 1:
        device = dense[0].device if dense else expert_square.device
        expert_square = expert_square.to(device)
        _count_reduced(RankGroup(groups.tp_ep, "tp_ep", counter=groups.counter), "all_reduce norm", expert_square)
        dist.all_reduce(expert_square, group=groups.tp_ep)
    norm = (_square_sum(dense) + expert_square).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in (*dense, *experts):
        grad.mul_(scale.to(grad.device, grad.dtype if grad.dtype == torch.float64 else torch.float32))
    return norm


def _square_sum(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, [] fp64."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    for grad in grads:
        total += torch.linalg.vector_norm(grad.float() if grad.itemsize < 4 else grad).double().square()
    return total


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
        _count_reduced(group, "all_reduce gradients", flat)
        dist.all_reduce(flat, group=group.group)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
    elif isinstance(scale, Tensor) or scale != 1.0:
        for grad in grads:
            grad.mul_(_like(scale, grad))


def _count_reduced(group: RankGroup, operation: str, values: Tensor) -> None:
    """Count an all_reduce that is about to run."""
    if group.counter is not None:
        group.counter.add_reduced(operation, group.name, values.nbytes)


def _like(scale: float | Tensor, grad: Tensor) -> float | Tensor:
    """Return a scale that lies where the gradient does."""
    return scale.to(grad.device) if isinstance(scale, Tensor) else scale


def sum_over_world(values: Tensor, groups: ProcessGroups) -> Tensor:
    """Return values summed over all ranks, in new storage; any shape and dtype that the backend reduces.

    Collectives: one all_reduce over tp_dp_cp.
    """
    return all_reduce_sum(values, group=groups.tp_dp_cp, name="tp_dp_cp", counter=groups.counter)


def all_ranks_succeeded(error: BaseException | None) -> list[str]:
    """Tell all ranks how each of them fared.

    Args:
        error: what went wrong on this rank, or None.

    Returns:
        One text per rank of the default group, "" where all went well.

    Collectives: one all_gather_object over the default group, which also is a barrier; none without a group.
    """
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return [text]
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts
