"""Transformer Engine's own Python of GroupedLinear on an emulated product: our calls fit it, all gradients are right.

Its kernels need a GPU, and so do all quantized products; of the recipes what is built and entered is compared.
"""

import copy
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dispatchers.base import ExpertInput
from moe.config import MoEConfig
from moe.experts import GroupedMLP
from moe.quantization.weights import keep_quantized_weights
from tests.parity import transformer_engine
from tests.tolerances import assert_close

HIDDEN, FFN, EXPERTS, ROWS = 16, 32, 4, 11
COUNTS = (5, 0, 7, 2)


@pytest.fixture(scope="module")
def theirs() -> Iterator[dict[str, types.ModuleType]]:
    """Transformer Engine's modules, where `moe.experts_te` imports them from."""
    modules = transformer_engine.load()
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("moe.experts_te", None)
        importlib.import_module("moe.experts_te")
        with transformer_engine.on_cpu(modules):
            yield modules


def build(backend: str, **fields: object) -> GroupedMLP:
    torch.manual_seed(1)
    sizes = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": FFN, "num_moe_experts": EXPERTS, "init_method_std": 0.3}
    experts = GroupedMLP(MoEConfig(moe_expert_backend=backend, **{**sizes, **fields}))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return experts


def draw(dtype: torch.dtype, num_rows: int = ROWS, counts: tuple[int, ...] = COUNTS) -> ExpertInput:
    """Slots that read any rows; the last one of each expert with two or more is padding, and all are without rows."""
    generator = torch.Generator().manual_seed(2)
    row_ids = torch.randint(max(num_rows, 1), (sum(counts),), generator=generator)
    ends = torch.tensor(counts).cumsum(0)[torch.tensor(counts) > 1] - 1
    row_ids[ends] = -1
    row_ids = row_ids if num_rows else row_ids.fill_(-1)
    probs = torch.rand(sum(counts), generator=generator).masked_fill(row_ids < 0, 0)
    tokens = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)
    return ExpertInput(
        tokens=tokens.requires_grad_(),
        row_ids=row_ids,
        probs=probs.requires_grad_(),
        tokens_per_expert=torch.tensor(counts),
        tokens_per_expert_list=counts,
        has_padding=True,
    )


def run(experts: GroupedMLP, expert_input: ExpertInput) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    leaves = {"tokens": expert_input.tokens, "probs": expert_input.probs, **dict(experts.named_parameters())}
    output = experts(expert_input)
    grads = torch.autograd.grad(
        output, list(leaves.values()), torch.cos(torch.arange(output.numel())).view_as(output).to(output)
    )
    return {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "plain"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_equals_the_reference_backend(theirs: Any, gated: bool, biases: bool, dtype: torch.dtype) -> None:
    fields = {"gated_linear_unit": gated, "add_bias_linear": biases, "params_dtype": dtype}
    results = [run(build(backend, **fields), draw(dtype)) for backend in ("reference", "te")]
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, dtype, name)


@pytest.mark.parametrize(
    ("num_rows", "counts"), [(0, COUNTS), (0, (0, 0, 0, 0)), (ROWS, (0, 0, 0, 0)), (1, (0, 0, 0, 1))]
)
def test_no_rows_and_no_slots(theirs: Any, num_rows: int, counts: tuple[int, ...]) -> None:
    fields = {"add_bias_linear": True}
    results = [run(build(backend, **fields), draw(torch.float32, num_rows, counts)) for backend in ("reference", "te")]
    for name, expected in results[0].items():
        assert_close(results[1][name], expected, what=name)


def test_it_has_no_parameters_memory_or_state_of_its_own(theirs: Any) -> None:
    reference, experts = build("reference", add_bias_linear=True), build("te", add_bias_linear=True)
    assert list(experts.state_dict()) == list(reference.state_dict())
    assert len(list(experts.modules())) == len(list(reference.modules()))
    linears = (experts.backend.fc1, experts.backend.fc2)
    run(experts, draw(torch.float32))
    assert all(tensor.is_meta for linear in linears for tensor in linear.parameters())
    copied = copy.deepcopy(experts.backend)
    assert copied.fc1 is not experts.backend.fc1
    assert copied.fc1.weight0.shape == experts.backend.fc1.weight0.shape


RECIPES = {
    "tensorwise": ("Float8CurrentScaling", {"fp8": "hybrid"}),
    "delayed": ("DelayedScaling", {"fp8": "e4m3", "fp8_margin": 1, "fp8_amax_history_len": 4}),
    "blockwise": ("Float8BlockScaling", {"fp8": "e4m3"}),
    "mxfp8": ("MXFP8BlockScaling", {"fp8": "hybrid"}),
    "nvfp4": ("NVFP4BlockScaling", {"fp4": "e2m1"}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_built_and_entered(theirs: Any, name: str) -> None:
    kind, fields = RECIPES[name]
    if "fp8" in fields:
        fields = {**fields, "fp8_recipe": name}
    experts = build("te", hidden_size=128, moe_ffn_hidden_size=128, params_dtype=torch.bfloat16, **fields)
    recipe = experts.backend.recipe
    expected = getattr(theirs["transformer_engine.common.recipe"], kind)
    assert isinstance(recipe, expected)
    if "fp8" in fields:
        assert recipe.fp8_format.name == fields["fp8"].upper()
    manager = theirs["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    with theirs["transformer_engine.pytorch"].autocast(enabled=True, recipe=recipe):
        assert manager.is_fp8_enabled()
        assert manager.get_fp8_recipe() is recipe
    assert not manager.is_fp8_enabled()


def test_delayed_scales_of_layers_are_updated_apart(theirs: Any) -> None:
    manager = theirs["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    recipes = [build("te", fp8="hybrid", fp8_recipe="delayed").backend.recipe for _ in range(2)]
    keys = [manager.get_unique_autocast_key(recipe) for recipe in (*recipes, *recipes)]
    assert keys[:2] == keys[2:]
    assert keys[0] != keys[1]
    assert (recipes[0].margin, recipes[0].amax_history_len, recipes[0].reduce_amax) == (0, 1, False)


def test_a_card_without_the_recipe_is_refused_and_nothing_stays_enabled(theirs: Any) -> None:
    fields = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "params_dtype": torch.bfloat16, "fp4": "e2m1"}
    message = r"fp4_recipe \('nvfp4'\) is not available on this device"
    with transformer_engine.on_cpu(theirs, capability=(9, 0)), pytest.raises(ValueError, match=message):
        build("te", **fields)
    assert not theirs["transformer_engine.pytorch.quantization"].FP8GlobalStateManager.is_fp8_enabled()


def test_kept_weights_without_a_recipe_change_nothing(theirs: Any) -> None:
    experts = build("te")
    expected = run(experts, draw(torch.float32))
    with keep_quantized_weights(experts):
        found = run(experts, draw(torch.float32))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
