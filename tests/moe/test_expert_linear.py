"""Weights stored in FP8: values, gradients in fp32, masters that the optimizer steps, checkpoints, moves."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
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
)
from moe.quantization.formats import E4M3

SIZES = {"hidden_size": 128, "num_moe_experts": 3, "moe_ffn_hidden_size": 256, "init_method_std": 0.2}
RECIPES = ["tensorwise", "delayed", "blockwise"]
WEIGHTS = ("linear_fc1", "linear_fc2")


def build(recipe: str, *, fp8_param: bool = True, seed: int = 0, **fields: Any) -> MoELayer:
    torch.manual_seed(seed)
    return MoELayer(MoEConfig(**{**SIZES, "fp8": "hybrid", "fp8_recipe": recipe, "fp8_param": fp8_param, **fields}))


def weight_of(layer: MoELayer, name: str) -> Tensor:
    """Return the weight [L, rows, columns] that the codes stand for."""
    return torch.stack([matrix.dequantize() for matrix in getattr(layer.experts, name).matrices()])


def gradients(layer: MoELayer) -> list[Tensor]:
    x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output = layer(x)
    output.square().sum().backward()
    assert x.grad is not None
    weights = [getattr(layer.experts, name).weight.grad for name in WEIGHTS]
    return [output.detach(), x.grad, layer.router.weight.grad, *weights]


@pytest.mark.parametrize("recipe", RECIPES)
def test_same_results_as_quantizing_in_every_forward(recipe: str) -> None:
    stored, plain = build(recipe), build(recipe, fp8_param=False)
    for name in WEIGHTS:
        linear, weight = getattr(stored.experts, name), getattr(plain.experts, name).weight
        assert linear.weight.dtype == E4M3.dtype
        assert linear.weight.shape == weight.shape
        assert linear.weight.nbytes * 4 == weight.nbytes
        error = (weight_of(stored, name) - weight.flatten(1, -2)).norm() / weight.norm()
        assert error < 2**-4 / 3**0.5
    for one, other in zip(gradients(stored), gradients(plain), strict=True):
        assert torch.equal(one, other)
    assert stored.experts.linear_fc1.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_micro_batches_add_up_in_fp32(recipe: str) -> None:
    layer = build(recipe)
    first = [grad.clone() for grad in gradients(layer)[3:]]
    with keep_quantized_weights(layer):
        second = gradients(layer)[3:]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(two, one + one)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_optimizer_steps_the_master_and_the_weight_follows(recipe: str) -> None:
    layer = build(recipe)
    masters = MasterWeights(layer)
    optimizer = torch.optim.AdamW(masters.of(layer.parameters()), lr=1e-2, weight_decay=0.1)
    masters.attach(optimizer)
    plain = {name: weight_of(layer, name).clone().requires_grad_() for name in WEIGHTS}
    reference = torch.optim.AdamW(plain.values(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        grads = gradients(layer)[3:]
        for weight, grad in zip(plain.values(), grads, strict=True):
            weight.grad = grad.flatten(1, -2).clone()
        optimizer.step()
        reference.step()
        for name in WEIGHTS:
            linear = getattr(layer.experts, name)
            master = masters.masters[linear.weight]
            assert torch.equal(master.flatten(1, -2), plain[name])
            assert linear.weight.grad is None
            error = (weight_of(layer, name) - plain[name]).norm() / plain[name].norm()
            assert 0.005 < error < 2**-4 / 3**0.5
    small = weight_of(layer, "linear_fc1").clone()  # a step below half a code's width moves the master alone
    before = {weight: master.clone() for weight, master in masters.masters.items()}
    optimizer.param_groups[0]["lr"] = 1e-9
    gradients(layer)
    optimizer.step()
    assert all(not torch.equal(master, before[weight]) for weight, master in masters.masters.items())
    assert (weight_of(layer, "linear_fc1") != small).float().mean() < 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_restores_codes_scales_and_masters(recipe: str, tmp_path: Path) -> None:
    def trained(seed: int) -> tuple[MoELayer, MasterWeights, torch.optim.Optimizer]:
        layer = build(recipe, seed=seed)
        masters = MasterWeights(layer)
        optimizer = torch.optim.AdamW(masters.of(layer.parameters()), lr=1e-2)
        masters.attach(optimizer)
        return layer, masters, optimizer

    def step(layer: MoELayer, optimizer: torch.optim.Optimizer) -> None:
        layer.zero_grad()
        gradients(layer)
        optimizer.step()

    def state(layer: MoELayer, masters: MasterWeights) -> list[Tensor]:
        tensors = [*layer.state_dict().values(), *(p.detach() for p in masters.masters.values())]
        return [t.view(torch.uint8) if t.itemsize == 1 else t for t in tensors]

    layer, masters, optimizer = trained(0)
    step(layer, optimizer)
    save_checkpoint(tmp_path, 1, layer, optimizer)
    other, other_masters, other_optimizer = trained(7)
    load_checkpoint(tmp_path, other, other_optimizer)
    for _ in range(2):
        for one, two in zip(state(layer, masters), state(other, other_masters), strict=True):
            assert torch.equal(one, two)
        step(layer, optimizer)
        step(other, other_optimizer)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    plain = build("tensorwise", fp8_param=False)
    save_checkpoint(tmp_path, 1, plain)
    with pytest.raises(ValueError, match=r"linear_fc1.weight_scale.*float8_e4m3fn"):
        load_checkpoint(tmp_path, build("tensorwise"))


def test_moving_and_copying_keep_codes_and_scales() -> None:
    layer = build("blockwise")
    before = {name: weight_of(layer, name) for name in WEIGHTS}
    clone = copy.deepcopy(layer).bfloat16()
    for name in WEIGHTS:
        linear = getattr(clone.experts, name)
        assert (linear.weight.dtype, linear.weight_scale.dtype) == (E4M3.dtype, torch.float32)
        assert torch.equal(weight_of(clone, name), before[name])
    assert clone.router.weight.dtype == torch.bfloat16
    x = torch.randn(40, 1, 128, dtype=torch.bfloat16)
    clone(x).sum().backward()
    assert clone.experts.linear_fc1.weight.grad.dtype == torch.float32


def test_finalize_gradients_gives_unused_weights_zeros_in_fp32() -> None:
    layer = build("tensorwise")
    finalize_gradients(layer, ProcessGroups.build())
    grad = layer.experts.linear_fc1.weight.grad
    assert grad.dtype == torch.float32
    assert not grad.any()


def test_models_without_such_weights_are_left_alone() -> None:
    layer = build("tensorwise", fp8_param=False)
    masters = MasterWeights(layer)
    parameters = list(layer.parameters())
    assert all(one is two for one, two in zip(masters.of(parameters), parameters, strict=True))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    masters.attach(optimizer)
    gradients(layer)
    optimizer.step()
    assert layer.experts.linear_fc1.weight.grad is not None
