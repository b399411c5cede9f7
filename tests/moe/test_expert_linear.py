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


def with_masters(**fields: Any) -> tuple[MoELayer, MasterWeights, torch.optim.Optimizer]:
    layer = build("tensorwise", **fields)
    masters = MasterWeights(layer)
    optimizer = torch.optim.SGD(masters.of(layer.parameters()), lr=1e-2)
    masters.attach(optimizer)
    return layer, masters, optimizer


def test_loss_scaling_clipping_and_zero_grad_over_the_optimizer_s_parameters_see_the_weights() -> None:
    layer, masters, optimizer = with_masters()
    gradients(layer)
    weight = layer.experts.linear_fc1.weight
    master = masters.masters[weight]
    assert master.grad.data_ptr() == weight.grad.data_ptr()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    assert weight.grad.norm() < 1.1e-3
    for set_to_none in (True, False):
        gradients(layer)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert weight.grad is None if set_to_none else not weight.grad.any()
        first = [grad.clone() for grad in gradients(layer)[3:]]
        for linear, grad in zip(WEIGHTS, first, strict=True):
            assert torch.equal(getattr(layer.experts, linear).weight.grad, grad)
        layer.zero_grad()
        gradients(layer)
        assert torch.equal(weight.grad, first[0])
        assert torch.equal(master.grad, first[0])


def test_a_gradient_scaler_unscales_them() -> None:
    layers = [with_masters() for _ in range(2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(40, 1, 128, generator=torch.Generator().manual_seed(1))
    layers[0][0](x).square().mean().backward()
    layers[0][2].step()
    scaler.scale(layers[1][0](x).square().mean()).backward()
    scaler.step(layers[1][2])
    plain, scaled = (next(iter(masters.masters.values())) for _, masters, _ in layers)
    assert (plain - scaled).abs().max() < 1e-5


def test_a_closure_and_two_optimizers_step_every_master() -> None:
    layer = build("tensorwise")
    masters = MasterWeights(layer)
    before = {weight: master.clone() for weight, master in masters.masters.items()}
    optimizers = []
    for name in WEIGHTS:
        optimizer = torch.optim.SGD(masters.of(getattr(layer.experts, name).parameters()), lr=1e-2)
        masters.attach(optimizer)
        optimizers.append(optimizer)
    gradients(layer)
    for optimizer in optimizers:
        optimizer.step()
    moved = {weight: master.clone() for weight, master in masters.masters.items()}
    assert all(not torch.equal(moved[weight], before[weight]) for weight in before)

    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = layer(torch.randn(40, 1, 128)).square().mean()
        loss.backward()
        return loss

    optimizers[0].step(closure)
    fc1 = layer.experts.linear_fc1.weight
    assert not torch.equal(masters.masters[fc1], moved[fc1])
    with pytest.raises(ValueError, match="holds no master"):
        masters.attach(torch.optim.SGD([layer.router.weight], lr=0.1))


def test_weights_loaded_behind_the_masters_are_not_undone_silently() -> None:
    layer, _, optimizer = with_masters()
    layer.load_state_dict(build("tensorwise", seed=5).state_dict())
    loaded = weight_of(layer, "linear_fc1").clone()
    gradients(layer)
    with pytest.raises(RuntimeError, match="make MasterWeights after loading"):
        optimizer.step()
    assert torch.equal(weight_of(layer, "linear_fc1"), loaded)


@pytest.mark.parametrize("strict", [True, False])
def test_codes_and_plain_weights_are_not_taken_for_each_other(strict: bool) -> None:
    stored, plain = build("tensorwise"), build("tensorwise", fp8_param=False)
    for one, other in ((stored, plain), (plain, stored)):
        with pytest.raises(RuntimeError, match="fp8_param must be equal"):
            one.load_state_dict(other.state_dict(), strict=strict)
