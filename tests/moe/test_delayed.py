"""Delayed scaling: scales follow from earlier steps, within a step nothing moves, and what may not count does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import MoEConfig, MoELayer, load_checkpoint, save_checkpoint, update_delayed_scales
from moe.quantization.delayed import DelayedScaling

SIZES = {"hidden_size": 32, "num_moe_experts": 3, "moe_ffn_hidden_size": 48, "init_method_std": 0.2}
INPUT, WEIGHT, GRADIENT = range(3)


def build(**fields: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(MoEConfig(**{**SIZES, "fp8": "hybrid", "fp8_recipe": "delayed", **fields}))


def train_step(layer: MoELayer, x: Tensor) -> None:
    layer(x).square().sum().backward()
    update_delayed_scales(layer)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("history_len", [1, 2, 4])
def test_scales_follow_the_history(history_len: int, algo: str) -> None:
    scaling = DelayedScaling(2, None, history_len, algo, margin=0)
    seen = [3.0, 7.0, 0.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    history, scale = [0.0] * history_len, 0.0
    for amax in seen:
        assert scaling.amax_of(1, 0, "weight").item() == scale
        for part in (0.5 * amax, amax, 0.1 * amax):  # micro-batches of a step
            scaling.record(torch.tensor(part), 1, 0, "weight")
        scaling.update()
        history = [amax, *history[:-1]]
        chosen = max(history) if algo == "max" else history[0]
        scale = chosen or scale  # an expert that saw nothing keeps its scale
        assert scaling.amax_history[1, WEIGHT].tolist() == history
    untouched = torch.ones_like(scaling.scale, dtype=torch.bool)
    untouched[1, WEIGHT] = False
    assert not scaling.scale[untouched].any()


def test_values_beyond_the_scale_of_the_last_step_saturate_and_margin_makes_room() -> None:
    outputs = {}
    for margin in (0, 5):
        layer = build(fp8_margin=margin)
        x = torch.randn(24, 1, 32)
        train_step(layer, x)
        small, large = layer(x), layer(3.5 * x)
        layer.experts.delayed_scaling.scale.zero_()  # the tensor's own magnitude
        exact = layer(3.5 * x)
        outputs[margin] = (large - exact).norm() / exact.norm()
        assert small.isfinite().all()
    assert outputs[0] > 0.3  # inputs were cut to the old largest magnitude
    assert outputs[5] < 0.15


def test_the_first_step_equals_tensorwise_scaling() -> None:
    delayed, current = build(), build(fp8_recipe="tensorwise")
    current.load_state_dict(delayed.state_dict(), strict=False)
    x = torch.randn(24, 1, 32)
    assert torch.equal(delayed(x), current(x))
    update_delayed_scales(delayed)
    assert torch.equal(delayed(x), current(x))  # the history holds just these values
    assert not torch.equal(delayed(2.7 * x), current(2.7 * x))


def test_recorded_magnitudes_are_those_of_the_operands() -> None:
    layer = build()
    x = torch.randn(24, 1, 32)
    layer(x).sum().backward()
    amax = layer.experts.delayed_scaling.amax
    weights = (layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight)
    for linear, weight in enumerate(weights):
        assert torch.equal(amax[:, 3 * linear + WEIGHT], weight.detach().abs().flatten(1).amax(1))
    _, routing_map = layer.router(x)
    for expert in range(3):
        assert amax[expert, INPUT] == x[:, 0][routing_map[:, expert]].abs().max()
    assert torch.equal(amax[:, 3 + GRADIENT], torch.ones(3))  # of the sum


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_only_training_counts(mode: str) -> None:
    layer = build()
    x = torch.randn(24, 1, 32)
    if mode == "eval":
        layer.eval()(x)
    else:
        with torch.no_grad():
            layer(x)
    assert not layer.experts.delayed_scaling.amax.any()


def test_recomputation_and_repetition_count_once() -> None:
    scales = []
    for recompute, times in ((False, 1), (True, 1), (False, 3)):
        layer = build(moe_layer_recompute=recompute)
        x = torch.randn(24, 1, 32, generator=torch.Generator().manual_seed(2))
        for _ in range(times):
            layer(x).sum().backward()
        update_delayed_scales(layer)
        scales.append(layer.experts.delayed_scaling.scale.clone())
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_values_show_and_do_not_spoil_later_steps(bad: float) -> None:
    layer = build(fp8_amax_history_len=4, fp8_amax_compute_algo="max")
    x = torch.randn(24, 1, 32)
    train_step(layer, x)
    spoilt = x.clone()
    spoilt[3, 0, 5] = bad
    layer.zero_grad()
    with torch.no_grad():
        probs, _ = layer.router(x)
    layer.router.register_forward_hook(lambda _, __, out: (probs, probs > 0))
    assert layer(spoilt).isnan().any()
    update_delayed_scales(layer)
    assert layer.experts.delayed_scaling.scale.max() < 1e3
    assert layer(x).isfinite().all()


def test_reset_parameters_forgets_scales() -> None:
    layer = build(fp8_amax_history_len=2)
    train_step(layer, torch.randn(24, 1, 32))
    layer(torch.randn(24, 1, 32)).sum().backward()
    layer.experts.reset_parameters()
    assert all(not buffer.any() for buffer in layer.experts.delayed_scaling.buffers())


def test_scales_stay_in_fp32_and_survive_a_checkpoint(tmp_path: Path) -> None:
    layer = build(fp8_amax_history_len=3)
    for step in range(2):
        train_step(layer, (1 + step) * torch.randn(24, 1, 32))
    save_checkpoint(tmp_path, 1, layer)
    other = build(fp8_amax_history_len=3)
    load_checkpoint(tmp_path, other)
    for name in ("amax_history", "scale"):
        kept = getattr(layer.experts.delayed_scaling, name).clone()
        assert kept.any()
        assert torch.equal(getattr(other.experts.delayed_scaling, name), kept)
        layer.bfloat16()
        assert getattr(layer.experts.delayed_scaling, name).dtype == torch.float32
        assert torch.equal(getattr(layer.experts.delayed_scaling, name), kept)
        layer.float()


def test_update_says_how_many_layers_it_updated() -> None:
    layers = torch.nn.ModuleDict({"a": build(), "b": torch.nn.ModuleList([build(), build(fp8_recipe="tensorwise")])})
    assert update_delayed_scales(layers) == 2
    assert update_delayed_scales(build(fp8=None)) == 0
