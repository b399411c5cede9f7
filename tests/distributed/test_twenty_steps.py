"""After 20 steps replicas are bitwise equal and memory is what it was after 3, in every kind of layout."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import (
    MoEGPT,
    ProcessGroups,
    apply_fsdp,
    clip_grad_norm,
    collect_metrics,
    finalize_gradients,
    update_expert_bias,
)
from moe.parallel import local_tensor, split_by_mesh
from tests.distributed.test_factorings import BIASED, CONFIG, Factoring, global_batch
from tests.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {"params_dtype": torch.float32},
    "bf16, recompute": {"params_dtype": torch.bfloat16, "moe_layer_recompute": True},
}


def live_bytes() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their distinct storages."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


def shard_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the place of this rank's part among the parts of a parameter; the same on replicas."""
    if not hasattr(parameter, "placements"):
        return ()
    place = parameter.device_mesh.get_coordinate()
    return tuple(
        index for index, placement in zip(place, parameter.placements, strict=True) if not placement.is_replicate()
    )


def steps_worker(factoring: Factoring, fields: dict[str, Any]) -> dict[str, Any]:
    groups = ProcessGroups.build(factoring.ep, factoring.etp, factoring.tp)
    torch.manual_seed(5)
    model = MoEGPT(replace(CONFIG, moe_router_dtype="fp32", moe_aux_loss_coeff=0.1, **BIASED, **fields), groups)
    if factoring.fsdp:
        apply_fsdp(model, groups)
    param_groups = [{"params": parameters} for parameters in split_by_mesh(model.parameters())]
    optimizer, live = torch.optim.AdamW(param_groups, lr=0.01), {}
    for step in range(1, 21):
        tokens, labels, _ = global_batch(step % 5)
        share = 2 * groups.dp.size()
        for micro in range(2):
            part = micro * groups.dp.size() + groups.dp.rank()
            model(tokens.chunk(share)[part], labels.chunk(share)[part]).backward()
        finalize_gradients(model, groups, 2)
        clip_grad_norm(model, 0.5, groups)
        optimizer.step()
        update_expert_bias(model, groups)
        collect_metrics(model, groups)
        optimizer.zero_grad()
        if step in (3, 20):
            live[step] = live_bytes()
    parts = {
        name: (shard_of(p), local_tensor(p.detach()).clone(), *map(local, optimizer.state[p].values()))
        for name, p in model.named_parameters()
    }
    parts |= {name: ((), local(buffer)) for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    dist.barrier()
    return {"parts": parts, "live": live}


def local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach()).clone()


CASES = [
    (Factoring(4, 2, 2, 1, False), "fp32"),
    (Factoring(4, 2, 1, 2, True), "bf16, recompute"),
]


@pytest.mark.parametrize(("factoring", "option"), CASES, ids=str)
def test_replicas_are_equal_and_memory_is_steady(factoring: Factoring, option: str) -> None:
    results = run_ranks(steps_worker, factoring.world, factoring, OPTIONS[option])
    num_compared = 0
    for name in results[0]["parts"]:
        first: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        for result in results:
            place, *tensors = result["parts"][name]
            if place not in first:
                first[place] = tuple(tensors)
                continue
            for mine, theirs in zip(tensors, first[place], strict=True):
                assert torch.equal(mine, theirs), (name, place)
            num_compared += 1
    assert num_compared > 50
    for result in results:
        assert result["live"][20] == result["live"][3]
