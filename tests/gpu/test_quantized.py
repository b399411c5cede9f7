"""Quantized experts on a GPU: the same bits as the CPU's where the definition says so, kernels within their bounds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import MoEConfig, MoELayer, keep_quantized_weights, pad_routing_map
from moe.quantization.quantize import quantize
from moe.quantization.recipes import RECIPES
from tests.tolerances import assert_close, quantized_bounds

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "num_moe_experts": 8, "moe_ffn_hidden_size": 384, "init_method_std": 0.1}
TOKENS = 777


def capability() -> tuple[int, int]:
    """Return the card's compute capability."""
    return torch.cuda.get_device_capability()


def fields_of(recipe: str, fp8: str = "e4m3") -> dict[str, Any]:
    return {"fp4": "e2m1"} if RECIPES[recipe].bits == 4 else {"fp8": fp8, "fp8_recipe": recipe}


def build(**fields: Any) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(MoEConfig(**{**SIZES, **fields}))


def run(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and every gradient."""
    x = x.clone().requires_grad_()
    output = layer(x)
    weight = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    (output * weight).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": output.detach(), "tokens": x.grad, **grads}


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return relative distances by name."""
    pairs = {name: (actual[name].double().cpu(), value.double().cpu()) for name, value in expected.items()}
    return {name: ((one - two).norm() / two.norm()).item() for name, (one, two) in pairs.items()}


@pytest.mark.parametrize("direction", ["rows", "columns"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizers_give_the_cpu_s_bits(recipe: str, direction: str) -> None:
    x = torch.randn(512, 384) * torch.randn(384).exp()
    block = RECIPES[recipe].block if direction == "rows" else RECIPES[recipe].block.t
    arguments = RECIPES[recipe].format_of("gradient", "hybrid"), block, RECIPES[recipe].scale_format
    here, there = quantize(x, *arguments), quantize(x.cuda(), *arguments)
    for one, two in zip(here.tensors, there.tensors, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), two.cpu().reshape(-1).view(torch.uint8))
    assert torch.equal(here.dequantize(), there.dequantize().cpu())


@pytest.mark.parametrize("pads_map", [False, True])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if not RECIPES[name].has_random_rounding])
def test_the_reference_backend_equals_the_cpu(recipe: str, pads_map: bool) -> None:
    fields = fields_of(recipe, "hybrid") | {
        "moe_router_padding_for_quantization": pads_map,
        "params_dtype": torch.float64,
    }
    layer = build(**fields, moe_router_dtype="fp64")
    twin = copy.deepcopy(layer).cuda()
    x = torch.randn(768, 1, 256, dtype=torch.float64)
    expected, actual = run(layer, x), run(twin, x.cuda())
    for name, value in expected.items():
        assert_close(actual[name].cpu(), value, what=name)


def test_grouped_mm_equals_the_reference_backend() -> None:
    layer = build(params_dtype=torch.bfloat16).cuda()
    grouped = build(params_dtype=torch.bfloat16, moe_expert_backend="torch").cuda()
    grouped.load_state_dict(layer.state_dict())
    x = torch.randn(TOKENS, 1, 256, dtype=torch.bfloat16, device="cuda")
    expected, actual = run(layer, x), run(grouped, x)
    for name, value in expected.items():
        assert_close(actual[name], value, what=name)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].torch_capability])
def test_scaled_grouped_mm_equals_the_emulation(recipe: str) -> None:
    if capability()[0] != RECIPES[recipe].torch_capability:
        pytest.skip(f"{recipe} needs compute capability {RECIPES[recipe].torch_capability}, not {capability()}")
    fields = fields_of(recipe) | {"params_dtype": torch.bfloat16}
    layer, kernels = build(**fields).cuda(), build(**fields, moe_expert_backend="torch").cuda()
    kernels.load_state_dict(layer.state_dict())
    x = torch.randn(TOKENS, 1, 256, dtype=torch.bfloat16, device="cuda")
    errors = differences(run(kernels, x), run(layer, x))
    bounds = quantized_bounds(recipe, "e4m3")
    for name, error in errors.items():  # a sum in another order may flip the code of an intermediate
        assert error < bounds.get(name.removeprefix("experts."), bounds["probs"]) / 2, name


@pytest.mark.parametrize("fp8", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].te_capability])
def test_transformer_engine_stays_in_the_bounds(recipe: str, fp8: str) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    if capability() < RECIPES[recipe].te_capability or (RECIPES[recipe].bits == 4 and fp8 == "hybrid"):
        pytest.skip(f"{recipe} {fp8} is not for compute capability {capability()}")
    exact = build(params_dtype=torch.bfloat16).cuda()
    layer = build(**fields_of(recipe, fp8), params_dtype=torch.bfloat16, moe_expert_backend="te").cuda()
    layer.load_state_dict(exact.state_dict(), strict=False)
    x = torch.randn(TOKENS, 1, 256, dtype=torch.bfloat16, device="cuda")
    with keep_quantized_weights(layer):
        errors = differences(run(layer, x), run(exact, x))
    bounds = quantized_bounds(recipe, fp8)
    for name, error in errors.items():
        assert error < bounds.get(name.removeprefix("experts."), bounds["probs"]), name


@pytest.mark.parametrize("num_tokens", [1, 48, 4096, 1 << 20])
@pytest.mark.parametrize("num_experts", [8, 100])
def test_the_kernel_pads_the_map_like_the_plain_function(num_experts: int, num_tokens: int) -> None:
    routing_map = torch.rand(num_tokens, num_experts, device="cuda") < 0.1
    multiple = 1 if num_tokens == 1 else 16
    before, version = routing_map.clone(), routing_map._version
    padded = pad_routing_map(routing_map, multiple, fused=True)
    assert torch.equal(padded, pad_routing_map(routing_map, multiple))
    assert torch.equal(routing_map, before)
    assert routing_map._version == version
    columns = routing_map.t().contiguous().t()
    assert torch.equal(pad_routing_map(columns, multiple, fused=True), padded)


def test_a_quantized_layer_copies_once_to_the_host() -> None:
    layer = build(**fields_of("mxfp8", "hybrid"), params_dtype=torch.bfloat16).cuda()
    x = torch.randn(TOKENS, 1, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroni"):
            layer(x)  # the dispatcher's one copy
    finally:
        torch.cuda.set_sync_debug_mode("default")
    output = layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
