"""The Transformer Engine backend over a stand-in with its signatures and demands; its own Python is in tests/parity."""

import copy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import GroupedMLP, MoEConfig, MoELayer, keep_quantized_weights
from moe.quantization.recipes import RECIPES
from tests.moe.test_quantized_experts import LOADS, draw_input, run
from tests.tolerances import assert_close

SIZES = {"hidden_size": 128, "moe_ffn_hidden_size": 256, "num_moe_experts": 5, "init_method_std": 0.2}


@dataclass
class Engine:
    """What the stand-in was asked for."""

    recipe: Any = None  # of the region that is open
    regions: list[Any] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    quantized: int = 0  # how often weights were quantized
    available: bool = True


def stand_in(engine: Engine) -> dict[str, types.ModuleType]:
    """Return modules with the names and demands of Transformer Engine 2.20 that the backend relies on."""

    class GroupedLinear(nn.Module):
        def __init__(self, num_gemms, in_features, out_features, *, bias, params_dtype, device, use_grouped_tensor):
            super().__init__()
            assert use_grouped_tensor is False
            self.num_gemms, self.in_features, self.out_features, self.has_bias = (
                num_gemms,
                in_features,
                out_features,
                bias,
            )
            self.dtype, self._fp8_workspaces = params_dtype, {}
            for index in range(num_gemms):
                shape = (out_features, in_features)
                self.register_parameter(
                    f"weight{index}", nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
                )
                if bias:
                    vector = torch.empty(out_features, dtype=params_dtype, device=device)
                    self.register_parameter(f"bias{index}", nn.Parameter(vector))

        def forward(self, inp, m_splits, is_first_microbatch=None):
            assert isinstance(m_splits, list)
            assert len(m_splits) == self.num_gemms
            assert sum(m_splits) == inp.shape[0]
            assert inp.shape[1] == self.in_features
            assert inp.dtype == self.dtype
            if engine.recipe is not None:
                assert all(split % engine.recipe.multiple == 0 for split in m_splits)
                if is_first_microbatch is not False:
                    engine.quantized += 1
                if is_first_microbatch is not None:
                    assert is_first_microbatch or self._fp8_workspaces
                    self._fp8_workspaces["weight"] = True
            engine.calls.append({"recipe": engine.recipe, "is_first_microbatch": is_first_microbatch})
            parts = []
            for index, rows in enumerate(inp.split(m_splits)):
                weight = getattr(self, f"weight{index}")
                assert weight.shape == (self.out_features, self.in_features)
                assert not weight.is_meta
                parts.append(
                    nn.functional.linear(rows, weight, getattr(self, f"bias{index}") if self.has_bias else None)
                )
            return torch.cat(parts)

    @contextmanager
    def autocast(enabled=True, recipe=None):
        assert enabled
        assert recipe is not None
        assert engine.recipe is None
        engine.recipe = recipe
        engine.regions.append(recipe)
        try:
            yield
        finally:
            engine.recipe = None

    def is_available(return_reason=False):
        assert return_reason
        return engine.available, "" if engine.available else "Device compute capability 9.9 or higher required."

    def recipe_class(name: str, multiple: int) -> type:
        def init(self, **options):
            self.__dict__.update(options)

        return type(name, (), {"__init__": init, "multiple": multiple})

    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    common, recipe = types.ModuleType("transformer_engine.common"), types.ModuleType("transformer_engine.common.recipe")
    pytorch.GroupedLinear, pytorch.autocast = GroupedLinear, autocast
    for name in ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4"):
        setattr(pytorch, f"is_{name}_available", is_available)
    recipe.Format = types.SimpleNamespace(HYBRID="HYBRID", E4M3="E4M3")
    for row in RECIPES.values():
        if row.te_name:
            setattr(recipe, row.te_name, recipe_class(row.te_name, row.row_multiple))
    common.recipe, package.pytorch, package.common = recipe, pytorch, common
    return {module.__name__: module for module in (package, pytorch, common, recipe)}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Put the stand-in where the backend imports it from."""
    engine = Engine()
    for name, module in stand_in(engine).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "moe.experts_te", raising=False)
    yield engine
    sys.modules.pop("moe.experts_te", None)


def build(backend: str, **fields: Any) -> GroupedMLP:
    torch.manual_seed(0)
    experts = GroupedMLP(MoEConfig(**{**SIZES, **fields}, moe_expert_backend=backend))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return experts


def quantized(recipe: str, fp8: str = "hybrid") -> dict[str, Any]:
    return {"fp4": "e2m1"} if RECIPES[recipe].bits == 4 else {"fp8": fp8, "fp8_recipe": recipe}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biases"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference_backend(dtype: torch.dtype, gated: bool, biases: bool, load: str, multiple: int) -> None:
    """Output and every gradient; probs do not sum to 1, experts without slots get zeros."""
    fields = {"params_dtype": dtype, "gated_linear_unit": gated, "add_bias_linear": biases}
    reference, ours = build("reference", **fields), build("te", **fields)
    assert ours.state_dict().keys() == reference.state_dict().keys()
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in reference.named_parameters()]
    expert_input = draw_input(128, LOADS[load], multiple, dtype)
    grad = torch.randn(expert_input.tokens.shape)
    wanted, actual = run(reference, expert_input, grad), run(ours, expert_input, grad)
    for name, value in wanted.items():
        assert_close(actual[name], value, dtype, what=name)


@pytest.mark.parametrize("recipe", [name for name, row in RECIPES.items() if row.te_name])
def test_one_region_with_the_recipe_for_each_forward(engine: Engine, recipe: str) -> None:
    options = (
        {"fp8_margin": 1, "fp8_amax_history_len": 7, "fp8_amax_compute_algo": "max"} if recipe == "delayed" else {}
    )
    for fp8, named in (("hybrid", "HYBRID"), ("e4m3", "E4M3")):
        experts = build("te", **quantized(recipe, fp8), **options)
        engine.regions.clear()
        engine.calls.clear()
        for _ in range(2):
            experts(draw_input(128, LOADS["uneven"], RECIPES[recipe].row_multiple, torch.float32)).sum().backward()
        assert len(engine.regions) == 2
        assert len(engine.calls) == 4
        asked = engine.regions[0]
        assert RECIPES[recipe].te_name in type(asked).__mro__[-2].__name__
        assert getattr(asked, "fp8_format", named) == named
        assert {call["recipe"] for call in engine.calls} == {asked}
        if recipe == "delayed":
            assert (asked.margin, asked.amax_history_len, asked.amax_compute_algo) == (1, 7, "max")
        assert f"{recipe} {'e2m1' if recipe == 'nvfp4' else fp8} by transformer_engine" in experts.extra_repr()


def test_no_region_without_a_recipe(engine: Engine) -> None:
    experts = build("te")
    experts(draw_input(128, LOADS["uneven"], 1, torch.float32)).sum().backward()
    assert engine.regions == []
    assert all(call["is_first_microbatch"] is None for call in engine.calls)


def test_two_layers_have_delayed_recipes_that_print_differently(engine: Engine) -> None:
    """Transformer Engine rolls the histories of all modules whose recipes print the same."""
    layers = [build("te", **quantized("delayed")) for _ in range(2)]
    assert len({repr(layer.backend.recipe) for layer in layers}) == 2


def test_weights_are_quantized_once_while_they_are_kept(engine: Engine) -> None:
    experts = build("te", **quantized("mxfp8"))
    expert_input = draw_input(128, LOADS["uneven"], 32, torch.float32)
    with keep_quantized_weights(experts):
        for _ in range(3):
            experts(draw_input(128, LOADS["uneven"], 32, torch.float32)).sum().backward()
    assert engine.quantized == 2  # fc1 and fc2
    assert [call["is_first_microbatch"] for call in engine.calls] == [True, True, False, False, False, False]
    with keep_quantized_weights(experts):
        experts(expert_input)
        with torch.no_grad():
            experts.linear_fc1.weight.mul_(2)
        with pytest.raises(RuntimeError, match="linear_fc1 was changed in place"):
            experts(expert_input)
    engine.calls.clear()
    experts(expert_input)
    assert [call["is_first_microbatch"] for call in engine.calls] == [None, None]


def test_a_copy_computes_the_same_with_linears_of_its_own(engine: Engine) -> None:
    layer = MoELayer(MoEConfig(**SIZES, **quantized("tensorwise"), moe_expert_backend="te"))
    experts, twin = layer.experts, copy.deepcopy(layer).experts
    expert_input = draw_input(128, LOADS["uneven"], 16, torch.float32)
    assert torch.equal(twin(expert_input), experts(expert_input))
    assert twin.backend.fc1 is not experts.backend.fc1
    assert twin.backend.operands is twin.operands
    assert all("fc1." not in name or "linear" in name for name in dict(experts.named_modules()))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params_dtype": torch.float64}, r"params_dtype \(torch.float64\)"),
        ({**quantized("delayed"), "moe_layer_recompute": True}, r"moe_layer_recompute \(True\).*'delayed'"),
    ],
)
def test_what_it_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("te", **fields)


@pytest.mark.parametrize("recipe", [name for name, row in RECIPES.items() if row.te_name])
def test_a_device_without_the_recipe_is_told_at_construction(engine: Engine, recipe: str) -> None:
    engine.available = False
    with pytest.raises(ValueError, match=rf"_recipe \('{recipe}'\).*capability 9.9 or higher.*'reference'"):
        build("te", **quantized(recipe))
    build("te")


@pytest.mark.usefixtures("engine")
def test_a_bias_cannot_learn_beside_a_frozen_weight() -> None:
    experts = build("te", add_bias_linear=True)
    experts.linear_fc1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"linear_fc1.weight \(requires_grad=False\)"):
        experts(draw_input(128, LOADS["uneven"], 1, torch.float32))


def test_without_the_library_the_error_names_it_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "moe.experts_te", raising=False)
    with pytest.raises(
        ImportError, match=r"moe_expert_backend \('te'\) needs Transformer Engine.*pip install.*'reference'"
    ):
        build("te")


def test_gradients_reach_the_stacked_parameters(engine: Engine) -> None:
    experts = build("te", params_dtype=torch.float32)
    output: Tensor = experts(draw_input(128, LOADS["one expert"], 1, torch.float32))
    output.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        used = parameter.grad.flatten(1).abs().amax(1) > 0
        assert used.tolist() == [False, False, False, True, False]
