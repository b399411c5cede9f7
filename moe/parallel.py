"""Process groups with parallel folding, and which part of a tensor a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dispatchers.accounting import CommunicationCounter
from dispatchers.collectives import RankGroup, group_of_one
from router.collectives import all_reduce_sum


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The process groups of one job. Attention and experts fold the same ranks in two ways.

    Rank order as in Megatron-Core: tp fastest, then cp, then dp; etp fastest, then ep, then edp.

    Attributes:
        tp, cp, dp: tensor-, context- and data-parallel ranks of the dense part.
        etp, ep, edp: tensor-, expert- and data-parallel ranks of the experts.
        tp_cp, dp_cp, tp_dp_cp, tp_ep: combined groups; tp_ep is etp x ep, tp_dp_cp is the world.
        mesh: DeviceMesh (dp, cp, tp), or None on one process.
        dp_cp_mesh: its dimensions dp and cp as one, over which FSDP2 shards dense parameters; or None.
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
    dp_cp_mesh: Any = None
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
        dp_cp_mesh = mesh["dp", "cp"]._flatten("dp_cp")
        own: dict[str, Any] = {name: mesh.get_group(name) for name in ("tp", "cp", "dp")}
        own |= {name: expert_mesh.get_group(name) for name in ("etp", "ep", "edp")}
        return cls(
            **own,
            tp_cp=mesh["cp", "tp"]._flatten("tp_cp").get_group(),
            dp_cp=dp_cp_mesh.get_group(),
            tp_dp_cp=world.get_group(),
            tp_ep=expert_mesh["ep", "etp"]._flatten("tp_ep").get_group(),
            mesh=mesh,
            dp_cp_mesh=dp_cp_mesh,
            expert_mesh=expert_mesh,
        )

    @property
    def is_expert_sharded(self) -> bool:
        """Whether expert parameters are spread over more than one rank."""
        return self.tp_ep.size() > 1


def check_same_layout(model: nn.Module, groups: ProcessGroups) -> None:
    """Raise ValueError if a module of the model was built with groups of other sizes."""
    for name, module in model.named_modules():
        own = getattr(module, "groups", None)
        if not isinstance(own, ProcessGroups) or own is groups:
            continue
        for size in ("tp", "cp", "dp", "etp", "ep", "edp"):
            theirs, ours = getattr(own, size).size(), getattr(groups, size).size()
            if theirs != ours:
                raise ValueError(
                    f"groups have {size} size {ours}, and {name or 'the model'} was built with groups of {size} size"
                    f" {theirs}; pass the same ones."
                )


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
            count_reduced(RankGroup(group, name, counter=groups.counter), "all_reduce amax", values)
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient: its own, fp32 for one of 8 bits."""
    return torch.float32 if parameter.itemsize == 1 else parameter.dtype


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_box(tensor: Any) -> tuple[slice, ...]:
    """Return which indices of a whole parameter this rank holds, a slice for each dimension."""
    if not hasattr(tensor, "to_local"):
        return tuple(slice(0, size) for size in tensor.shape)
    chunks = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks a DTensor for
    if not chunks:  # a rank behind the last of uneven shards
        return tuple(slice(0, size) for size in local_tensor(tensor).shape)
    offsets, sizes = chunks[0].offsets, chunks[0].sizes
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def mesh_names(parameter: Any) -> tuple[str, ...]:
    """Return the names of the mesh dimensions that a parameter is a DTensor over; none for a plain tensor."""
    return tuple(parameter.device_mesh.mesh_dim_names) if hasattr(parameter, "device_mesh") else ()


def num_shards(parameter: Any) -> int:
    """Return into how many parts the ranks have cut a parameter, 1 for a plain tensor."""
    if not hasattr(parameter, "placements"):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def split_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in groups that one operation of an optimizer can take: DTensors of one mesh, or plain."""
    groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_names(parameter), []).append(parameter)
    return list(groups.values())


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


def count_reduced(group: RankGroup, operation: str, values: Tensor) -> None:
    """Count an all_reduce that is about to run."""
    if group.counter is not None:
        group.counter.add_reduced(operation, group.name, values.nbytes)


def gather_over_tp(values: Tensor, groups: ProcessGroups) -> Tensor:
    """Return the values of every rank of tp, in rank order: [...] of one shape -> [TP, ...]. Not differentiable.

    Collectives: one all_gather over tp.
    """
    values, size = values.contiguous(), groups.tp.size()
    parts = [torch.empty_like(values) for _ in range(size)]
    groups.counter.add_rows("all_gather cross-entropy", "tp", groups.tp.rank(), [1] * size, values.nbytes)
    dist.all_gather(parts, values, group=groups.tp)
    return torch.stack(parts)


def sum_over_world(values: Tensor, groups: ProcessGroups) -> Tensor:
    """Return values summed over all ranks, in new storage; any shape and dtype that the backend reduces.

    Collectives: one all_reduce over tp_dp_cp.
    """
    return all_reduce_sum(values, group=groups.tp_dp_cp, name="tp_dp_cp", counter=groups.counter)


def all_ranks_succeeded(error: BaseException | None, group: dist.ProcessGroup | None = None) -> list[str]:
    """Tell all ranks how each of them fared.

    Args:
        error: what went wrong on this rank, or None.
        group: of all ranks; None: the default group.

    Returns:
        One text per rank, "" where all went well.

    Collectives: one all_gather_object over the group, which also is a barrier; none without torch.distributed.
    """
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return [text]
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text, group=group)
    return texts
