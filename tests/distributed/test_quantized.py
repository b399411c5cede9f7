"""Quantized experts over ranks: scales belong to experts, so results do not depend on where an expert lives.

With every expert on one rank (EP = number of ranks) an expert sees the same rows in the same order as on one process,
and everything is equal to fp64 rounding. Where replicas or slices of an expert have scales of their own (EDP, ETP) the
bounds of quantization hold.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import (
    MasterWeights,
    MoEConfig,
    MoELayer,
    ProcessGroups,
    finalize_gradients,
    keep_quantized_weights,
    load_checkpoint,
    save_checkpoint,
    update_delayed_scales,
)
from moe.parallel import local_tensor
from tests.ranks import run_ranks
from tests.tolerances import assert_close, quantized_bounds

HIDDEN, FFN, EXPERTS = 128, 256, 4
TOKENS = (37, 0, 64, 11)  # of each rank
RECIPES: dict[str, dict[str, Any]] = {
    **{
        name: {"fp8": "hybrid", "fp8_recipe": name}
        for name in ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
    },
    "nvfp4": {"fp4": "e2m1"},
}
MODES: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "padded map": {"moe_router_padding_for_quantization": True, "moe_router_fusion": True},
    "deduplicated": {"moe_token_dispatcher_type": "deduplicated"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}


def build(groups: ProcessGroups | None, **fields: Any) -> MoELayer:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "init_method_std": 0.2}
    sizes["moe_router_dtype"] = "fp64"
    return MoELayer(MoEConfig(**{**sizes, "params_dtype": torch.float64, **fields}), groups)


def batch(tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return all ranks' inputs and the gradients of their outputs: [T, 1, H]."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, sum(tokens), 1, HIDDEN)
    x, grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, grad


def gradients(layer: MoELayer, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of sum(output * grad)."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    (output * grad).sum().backward()
    assert x.grad is not None
    grads = {name: local_tensor(parameter.grad) for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "tokens": x.grad, **grads}


def compare_worker(mode: str) -> list[str]:
    """Return what differs from one process, for every recipe; stochastic rounding takes the nearest."""
    with mock.patch.object(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.5)):
        return differences(mode)


def differences(mode: str) -> list[str]:
    """Return what differs from one process, for every recipe."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(expert_model_parallel_size=size)
    tokens = TOKENS[:size] if mode != "padded map" else (128, 256, 0, 128)[:size]
    x, grad = batch(tokens)
    here = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    faults = []
    for recipe, quantized in RECIPES.items():
        layer, alone = build(groups, **quantized, **MODES[mode]), build(None, **quantized, **MODES[mode])
        experts = slice(*(EXPERTS // size * (rank + i) for i in (0, 1)))
        actual, wanted = gradients(layer, x[here], grad[here]), gradients(alone, x, grad)
        dist.all_reduce(actual["router.weight"])
        for name, value in wanted.items():
            part = (
                value[experts] if name.startswith("experts") else value[here] if name in ("output", "tokens") else value
            )
            try:
                assert_close(actual[name], part, torch.float64, what=f"{recipe}: {name}")
            except AssertionError as error:
                faults.append(str(error))
    return faults


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_depend_on_where_experts_live(mode: str, world_size: int) -> None:
    assert run_ranks(compare_worker, world_size, mode) == [[]] * world_size


def factoring_worker(recipe: str, ep: int, etp: int) -> dict[str, float]:
    """Return the relative distance from one process without quantization."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = ProcessGroups.build(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    x, grad = batch(TOKENS[:size])
    here = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))
    layer, exact = build(groups, **RECIPES[recipe]), build(None)
    actual, wanted = gradients(layer, x[here], grad[here]), gradients(exact, x, grad)
    finalize_gradients(layer, groups)
    errors = {}
    for name, parameter in layer.named_parameters():
        if name.startswith("experts"):
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            value = whole * groups.dp_cp.size()
            errors[name.removeprefix("experts.")] = ((value - wanted[name]).norm() / wanted[name].norm()).item()
    for name in ("output", "tokens"):
        error = (actual[name] - wanted[name][here]).norm()
        errors[name] = (error / wanted[name].norm()).item()
    return errors


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_replicas_and_slices_of_an_expert_stay_in_the_bounds(recipe: str, ep: int, etp: int) -> None:
    size = max(2, ep * etp)
    bounds = quantized_bounds(recipe, "hybrid")
    for errors in run_ranks(factoring_worker, size, recipe, ep, etp):
        for name, error in errors.items():
            assert error < bounds[name], name


def stored_worker(recipe: str, ep: int, folder: str, load: bool) -> list[list[float]]:
    """Train two steps with FP8 weights, or load and train on; return sums that tell the state after each."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroups.build(expert_model_parallel_size=ep)
    layer = build(groups, **RECIPES[recipe], fp8_param=True)
    masters = MasterWeights(layer)
    lr = 1e-4 * size  # the objective is the mean over ranks
    optimizer = torch.optim.SGD(masters.of(layer.parameters()), lr=lr)
    masters.attach(optimizer)
    x, grad = batch((64,))
    share = slice(64 // size * rank, 64 // size * (rank + 1))
    states = []
    if load:
        load_checkpoint(folder, layer, optimizer)
        optimizer.param_groups[0]["lr"] = lr
    for step in range(1, 3):
        with keep_quantized_weights(layer):
            gradients(layer, x[share], grad[share])
        assert layer.experts.linear_fc1.weight.grad.dtype == torch.float32
        finalize_gradients(layer, groups)
        optimizer.step()
        update_delayed_scales(layer)
        if step == 1 and not load:
            save_checkpoint(folder, 1, layer, optimizer)
        tensors = [layer.experts.linear_fc1.weight, layer.experts.linear_fc1.weight_scale]
        tensors += [masters.masters[layer.experts.linear_fc2.weight]]
        if layer.experts.delayed_scaling is not None:
            tensors += [layer.experts.delayed_scaling.amax_history, layer.experts.delayed_scaling.scale]
        tensors = [local_tensor(tensor).detach() for tensor in tensors]
        sums = [t.view(torch.uint8).double().sum() if t.itemsize == 1 else t.double().abs().sum() for t in tensors]
        total = torch.stack(sums)
        dist.all_reduce(total, group=groups.ep)
        states.append(total.tolist())
    return states


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_fp8_weights_train_alike_on_one_and_more_ranks_and_checkpoints_move(recipe: str, tmp_path: Path) -> None:
    folders = {ep: str(tmp_path / str(ep)) for ep in (1, 2)}
    saved = {ep: run_ranks(stored_worker, ep, recipe, ep, folders[ep], False)[0] for ep in (1, 2)}
    for one, two in zip(*saved.values(), strict=True):
        assert one == pytest.approx(two, rel=1e-6)
    for ep_saved, ep_loaded in ((1, 2), (2, 1), (2, 2)):
        resumed = run_ranks(stored_worker, ep_loaded, recipe, ep_loaded, folders[ep_saved], True)[0]
        assert resumed[0] == pytest.approx(saved[ep_saved][1], rel=1e-6)


def amax_worker(ep: int, etp: int) -> tuple[float, list[float]]:
    """Return this rank's own largest input and the scales after an update."""
    groups = ProcessGroups.build(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    layer = build(groups, **RECIPES["delayed"])
    x = torch.randn(30, 1, HIDDEN, dtype=torch.float64) * (1 + dist.get_rank())
    layer(x).sum().backward()
    assert update_delayed_scales(layer) == 1
    return x.abs().max().item(), local_tensor(layer.experts.delayed_scaling.scale)[:, 0].tolist()


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (1, 2)])
def test_replicas_and_slices_of_an_expert_agree_on_delayed_scales(ep: int, etp: int) -> None:
    results = run_ranks(amax_worker, 2, ep, etp)
    assert results[0][1] == results[1][1]
    assert max(results[0][1]) == pytest.approx(max(own for own, _ in results))


def test_fp8_weights_with_one_scale_cannot_be_sliced() -> None:
    assert run_ranks(refusal_worker, 2) == ["fp8_param (True) with fp8_recipe 'tensorwise' needs"] * 2


def refusal_worker() -> str:
    groups = ProcessGroups.build(expert_tensor_parallel_size=2)
    build(groups, **RECIPES["blockwise"], fp8_param=True)
    try:
        build(groups, **RECIPES["tensorwise"], fp8_param=True)
    except ValueError as error:
        return " ".join(str(error).split()[:6])
    return "nothing"
