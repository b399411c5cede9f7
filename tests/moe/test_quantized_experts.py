"""Experts in FP8 and FP4: every product against the oracle, bounds against fp64, padding, what is saved and kept."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatchers.base import ExpertInput
from moe import GroupedMLP, MoEConfig, MoELayer, gemm, keep_quantized_weights
from moe.quantization import grouped_gemm
from moe.quantization.quantize import hadamard
from moe.quantization.recipes import RECIPES
from moe.quantization.stored import store_activation
from tests import quantized_reference, reference
from tests.tolerances import assert_close, quantized_bounds

SIZES = {"blockwise": (128, 256), "mxfp8": (64, 96)}  # H, F; others:
OTHER_SIZES = (48, 80)
EXPERTS = 5
KINDS = [(name, fp8) for name in RECIPES for fp8 in (("hybrid", "e4m3") if name != "nvfp4" else ("",))]
ONE_KIND = [(name, "" if name == "nvfp4" else "hybrid") for name in RECIPES]
LOADS = {
    "uneven": (7, 0, 1, 150, 30),
    "one expert": (0, 0, 0, 61, 0),
    "nothing": (0, 0, 0, 0, 0),
}
Results = dict[str, Tensor]


def fields_of(recipe: str, fp8: str, **fields: Any) -> dict[str, Any]:
    """Return the config fields of a recipe."""
    hidden, ffn = SIZES.get(recipe, OTHER_SIZES)
    quantized = {"fp4": "e2m1"} if recipe == "nvfp4" else {"fp8": fp8, "fp8_recipe": recipe}
    sizes = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "num_moe_experts": EXPERTS}
    return {**sizes, "init_method_std": 0.2, **quantized, **fields}


def build(recipe: str, fp8: str, **fields: Any) -> GroupedMLP:
    torch.manual_seed(3)
    experts = GroupedMLP(MoEConfig(**fields_of(recipe, fp8, **fields)))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return experts


def draw_input(hidden: int, load: tuple[int, ...], multiple: int, dtype: torch.dtype = torch.float64) -> ExpertInput:
    """Return rows that several slots read, padded to the multiple; probs are any numbers."""
    generator = torch.Generator().manual_seed(5)
    num_rows = max(max(load), 3)
    ids = [torch.randperm(num_rows, generator=generator)[:count].sort().values for count in load]
    tokens = torch.randn(num_rows, hidden, generator=generator, dtype=torch.float64)
    probs = torch.rand(sum(load), generator=generator, dtype=torch.float64) + 0.25
    counts = torch.tensor(load)
    probs = probs.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return ExpertInput.padded(
        tokens.to(dtype).requires_grad_(), torch.cat(ids), probs.requires_grad_(), counts, load, multiple
    )


def run(experts: GroupedMLP, expert_input: ExpertInput, grad: Tensor) -> Results:
    """Return the output and every gradient of sum(output * grad); those of probs without padding slots."""
    parameters = dict(experts.named_parameters())
    leaves = [expert_input.tokens, expert_input.probs, *parameters.values()]
    output = experts(expert_input)
    grads = torch.autograd.grad(output, leaves, grad.to(output.dtype))
    probs = grads[1][expert_input.row_ids >= 0]
    return {
        "output": output.detach(),
        "tokens": grads[0],
        "probs": probs,
        **dict(zip(parameters, grads[2:], strict=True)),
    }


def expected(experts: GroupedMLP, expert_input: ExpertInput, grad: Tensor, recipe: str, fp8: str, act: Any) -> Results:
    """Return the same by the oracle, expert by expert."""
    oracle = quantized_reference.Experts(recipe, fp8, transform=lambda x: hadamard(x).double())
    named = {"fc1": "linear_fc1.weight", "fc2": "linear_fc2.weight"}
    named |= {"fc1_bias": "linear_fc1.bias", "fc2_bias": "linear_fc2.bias"}
    parameters = {
        key: p.detach() for key, name in named.items() if (p := dict(experts.named_parameters()).get(name)) is not None
    }
    tokens, row_ids = expert_input.tokens.detach(), expert_input.row_ids
    real = row_ids >= 0
    sums = {
        "output": torch.zeros_like(tokens),
        "tokens": torch.zeros_like(tokens),
        "probs": torch.zeros(len(row_ids)).double(),
    }
    sums |= {named[key]: torch.zeros_like(p) for key, p in parameters.items()}
    start = 0
    for expert, count in enumerate(expert_input.tokens_per_expert_list):
        part = slice(start, start + count)
        start += count
        if count == 0:
            continue
        keep, ids = real[part], row_ids[part]
        x, dy = (torch.where(keep.unsqueeze(-1), values[ids.clamp(min=0)], 0.0) for values in (tokens, grad))
        weights = {key: p[expert] for key, p in parameters.items()}
        result = oracle.run(x, expert_input.probs.detach()[part], dy, weights, act)
        sums["output"].index_add_(0, ids[keep], result["y"][keep])
        sums["tokens"].index_add_(0, ids[keep], result["tokens"][keep])
        sums["probs"][part] = result["probs"]
        for key in parameters:
            sums[named[key]][expert] = result[key]
    sums["probs"] = sums["probs"][real]
    return sums


@pytest.fixture
def _half_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stochastic rounding round to nearest, ties up."""
    monkeypatch.setattr(torch, "rand_like", lambda tensor: torch.full_like(tensor, 0.5))


@pytest.fixture
def _dirty_memory() -> Iterator[None]:
    """Fill all memory that an operation leaves unwritten with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_half_up", "_dirty_memory")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biases"), [(True, True), (False, False)])
@pytest.mark.parametrize(("recipe", "fp8"), KINDS)
def test_every_product_equals_the_oracle(recipe: str, fp8: str, gated: bool, biases: bool, load: str) -> None:
    experts = build(recipe, fp8, params_dtype=torch.float64, gated_linear_unit=gated, add_bias_linear=biases)
    hidden = experts.config.hidden_size
    expert_input = draw_input(hidden, LOADS[load], RECIPES[recipe].row_multiple)
    grad = torch.randn(expert_input.tokens.shape, dtype=torch.float64)
    actual = run(experts, expert_input, grad)
    wanted = expected(experts, expert_input, grad, recipe, fp8, partial(reference.activation, "silu"))
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(actual[name], value, torch.float64, what=name)


@pytest.mark.parametrize(("recipe", "fp8"), KINDS)
def test_relative_errors_beside_fp64_stay_in_their_bounds(recipe: str, fp8: str) -> None:
    """Prints the relative error of each operand (pytest -s)."""
    hidden, ffn = 256, 384
    experts = build(recipe, fp8, params_dtype=torch.float64, hidden_size=hidden, moe_ffn_hidden_size=ffn)
    expert_input = draw_input(hidden, (100, 200, 0, 256, 31), RECIPES[recipe].row_multiple)
    fields = fields_of(recipe, fp8, params_dtype=torch.float64, hidden_size=hidden, moe_ffn_hidden_size=ffn)
    exact = GroupedMLP(MoEConfig(**{name: value for name, value in fields.items() if not name.startswith("fp")}))
    exact.load_state_dict(experts.state_dict(), strict=False)
    grad = torch.randn(expert_input.tokens.shape, dtype=torch.float64)
    actual, wanted = run(experts, expert_input, grad), run(exact, expert_input, grad)
    bounds = quantized_bounds(recipe, fp8)
    for name, value in wanted.items():
        error = ((actual[name] - value).norm() / value.norm()).item()
        print(f"{recipe} {fp8} {name}: relative error {error:.4f}, bound {bounds[name]:.4f}")
        assert bounds[name] / 4 < error < bounds[name], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
def test_other_dtypes_compute_the_same(recipe: str, fp8: str, dtype: torch.dtype) -> None:
    """Bits differ where a sum in fp32 rounds an intermediate to another code: the bounds of two quantizations hold."""
    wide = build(recipe, fp8, params_dtype=torch.float64)
    narrow = build(recipe, fp8, params_dtype=dtype)
    narrow.load_state_dict(wide.state_dict(), strict=False)
    wide.load_state_dict(narrow.state_dict(), strict=False)
    inputs = [
        draw_input(wide.config.hidden_size, LOADS["uneven"], RECIPES[recipe].row_multiple, t)
        for t in (torch.float64, dtype)
    ]
    grad = torch.randn(inputs[0].tokens.shape, dtype=torch.float64).to(dtype)
    expected_values, actual = run(wide, inputs[0], grad), run(narrow, inputs[1], grad)
    bounds = quantized_bounds(recipe, fp8)
    for name, value in expected_values.items():
        assert actual[name].dtype == (torch.float32 if name == "probs" else dtype)
        assert (actual[name].double() - value).norm() < bounds[name] * value.norm(), name


@pytest.mark.usefixtures("_half_up")
@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
def test_more_padding_changes_no_real_row(recipe: str, fp8: str) -> None:
    experts = build(recipe, fp8)
    hidden, multiple = experts.config.hidden_size, RECIPES[recipe].row_multiple
    results = []
    for times in (1, 3):
        expert_input = draw_input(hidden, LOADS["uneven"], times * multiple, torch.float32)
        generator = torch.Generator().manual_seed(1)
        results.append(run(experts, expert_input, torch.randn(expert_input.tokens.shape, generator=generator)))
    for name in ("output", "tokens", "probs"):
        assert torch.equal(results[0][name], results[1][name]), name
    for name in ("linear_fc1.weight", "linear_fc2.weight"):  # longer sums of zeros may be cut otherwise
        assert_close(results[1][name], results[0][name], torch.float32, what=name)


@pytest.mark.parametrize("num_tokens", [256, 250])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
@pytest.mark.usefixtures("_half_up")
def test_map_padding_and_slot_padding_give_the_same_bits(recipe: str, fp8: str, fused: bool, num_tokens: int) -> None:
    results, maps = [], []
    for pads_map in (False, True):
        torch.manual_seed(1)
        fields = fields_of(recipe, fp8, moe_router_padding_for_quantization=pads_map, moe_router_fusion=fused)
        layer = MoELayer(MoEConfig(**fields, moe_aux_loss_coeff=0.1))
        x = torch.randn(num_tokens, 1, fields["hidden_size"], requires_grad=True)
        layer.router.register_forward_hook(lambda _, __, out: maps.append((out[1], out[1].clone(), out[1]._version)))
        output = layer(x)
        (output * torch.randn_like(output)).sum().backward()
        results.append([output.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for slots, padded in zip(*results, strict=True):
        assert torch.equal(slots, padded)
    for routing_map, before, version in maps:
        assert torch.equal(routing_map, before)
        assert routing_map._version == version


@pytest.mark.parametrize("pads_map", [False, True])
@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
def test_dispatched_counts_are_multiples(recipe: str, fp8: str, pads_map: bool) -> None:
    layer = MoELayer(MoEConfig(**fields_of(recipe, fp8, moe_router_padding_for_quantization=pads_map)))
    seen: list[ExpertInput] = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer(torch.randn(77, 1, layer.config.hidden_size))
    assert all(count % RECIPES[recipe].row_multiple == 0 for count in seen[0].tokens_per_expert_list)
    assert sum(seen[0].tokens_per_expert_list) >= 154


def saved_bytes(experts: GroupedMLP, expert_input: ExpertInput) -> int:
    """Return the bytes of distinct tensors that autograd keeps for backward, parameters not counted."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in experts.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = experts(expert_input)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
def test_saved_bytes_are_those_of_the_documentation(recipe: str, fp8: str) -> None:
    """Saved: per slot the quantized row or per row the row, 2 G F (or G F + scales) per slot, ids and probs."""
    hidden, ffn, multiple = 256, 384, RECIPES[recipe].row_multiple
    sizes = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "params_dtype": torch.bfloat16}
    for load in ((256, 128, 0, 0, 0), (256, 256, 256, 0, 0)):
        expert_input = draw_input(hidden, load, multiple, torch.bfloat16)
        num_rows, num_slots = expert_input.tokens.shape[0], sum(expert_input.tokens_per_expert_list)
        bits = RECIPES[recipe].bits
        scale_bytes = {
            "tensorwise": 5 * 4,
            "delayed": 5 * 4,
            "rowwise": 5 * hidden * 4,
            "blockwise": num_slots // 128 * hidden * 4,
            "mxfp8": num_slots // 32 * hidden,
            "nvfp4": num_slots // 16 * hidden + 5 * 4,
        }[recipe]
        rows = num_rows * hidden * 2
        columns = num_slots * hidden * bits // 8
        kept_rows = columns + scale_bytes if columns < rows else rows
        ids_and_probs = num_slots * (8 + 4)
        first = num_slots * 2 * ffn
        plain = saved_bytes(build(recipe, fp8, **sizes), expert_input)
        stored = saved_bytes(build(recipe, fp8, **sizes, activation_func_fp8_input_store=True), expert_input)
        assert plain - (kept_rows + 2 * first + ids_and_probs) in range(0, 64)
        assert stored - (kept_rows + first + num_slots * 2 * ffn // 128 * 4 + ids_and_probs) in range(0, 64)


def test_the_activation_kept_in_fp8_halves_it_and_keeps_a_bound() -> None:
    sizes = {"hidden_size": 64, "moe_ffn_hidden_size": 128, "num_moe_experts": EXPERTS, "init_method_std": 0.2}
    torch.manual_seed(0)
    plain, stored = (GroupedMLP(MoEConfig(**sizes, activation_func_fp8_input_store=on)) for on in (False, True))
    stored.load_state_dict(plain.state_dict())
    expert_input = draw_input(64, LOADS["uneven"], 1, torch.float32)
    grad = torch.randn(expert_input.tokens.shape)
    first, second = run(plain, expert_input, grad), run(stored, expert_input, grad)
    assert torch.equal(first["output"], second["output"])
    for name in ("tokens", "probs", "linear_fc1.weight", "linear_fc2.weight"):
        error = (first[name] - second[name]).norm() / first[name].norm()
        assert 1e-3 < error < 2 * 2**-4 / 3**0.5 * 1.64, name  # the rounding of E4M3, passed on by the activation
    num_slots = sum(LOADS["uneven"])
    assert saved_bytes(plain, expert_input) - saved_bytes(stored, expert_input) == num_slots * (3 * 256 - 2 * 4)


def count_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Return a list that grows with every quantization of a linear's weights."""
    calls: list[tuple[int, bool]] = []
    original = grouped_gemm.ReferenceGemm.weight

    def weight(self: Any, weight: Tensor, linear: int, *, is_transposed: bool) -> Any:
        calls.append((linear, is_transposed))
        return original(self, weight, linear, is_transposed=is_transposed)

    monkeypatch.setattr(grouped_gemm.ReferenceGemm, "weight", weight)
    return calls


@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
def test_weights_are_quantized_once_while_they_are_kept(recipe: str, fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_quantized_weights(monkeypatch)
    layer = MoELayer(MoEConfig(**fields_of(recipe, fp8)))
    batches = torch.randn(3, 20, 1, layer.config.hidden_size)
    grads = []
    for keeps in (False, True):
        torch.manual_seed(0)
        layer.zero_grad()
        calls.clear()
        if keeps:
            with keep_quantized_weights(layer):
                for batch in batches:
                    layer(batch).sum().backward()
            assert sorted(calls) == [(0, False), (0, True), (1, False), (1, True)]
        else:
            for batch in batches:
                layer(batch).sum().backward()
            assert len(calls) == 12
        grads.append([p.grad.clone() for p in layer.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_weight_that_changes_while_it_is_kept_raises() -> None:
    layer = MoELayer(MoEConfig(**fields_of("tensorwise", "e4m3")))
    x = torch.randn(20, 1, layer.config.hidden_size)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with keep_quantized_weights(layer):
        layer(x).sum().backward()
        with pytest.raises(RuntimeError, match="do not nest"), keep_quantized_weights(layer):
            pass
        layer(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"linear_fc1 was changed in place \(version \d+ -> \d+\)"):
            layer(x)
    before = layer(x)
    optimizer.step()
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
@pytest.mark.usefixtures("_half_up")
def test_recomputation_changes_nothing(recipe: str, fp8: str) -> None:
    results = []
    for recompute in ({}, {"moe_layer_recompute": True}, {"moe_recompute": "mlp"}):
        torch.manual_seed(4)
        layer = MoELayer(MoEConfig(**fields_of(recipe, fp8, **recompute)))
        x = torch.randn(60, 1, layer.config.hidden_size, requires_grad=True)
        layer(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_outputs_do_not_depend_on_the_number_of_chunks(recipe: str) -> None:
    """Scales of these recipes belong to rows, so forward and input gradients are the same; weight gradients are not."""
    results = []
    for num_chunks in (1, 3):
        torch.manual_seed(4)
        layer = MoELayer(MoEConfig(**fields_of(recipe, "hybrid", moe_dispatch_num_chunks=num_chunks)))
        x = torch.randn(100, 1, layer.config.hidden_size, requires_grad=True)
        output = layer(x)
        output.square().sum().backward()
        results.append((output.detach(), x.grad, layer.experts.linear_fc1.weight.grad))
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        assert_close(other, one, torch.float32)
    bound = 2 * quantized_bounds(recipe, "hybrid")["linear_fc1.weight"]
    assert (results[0][2] - results[1][2]).norm() < bound * results[0][2].norm()


def test_two_models_with_interleaved_steps_do_not_meet() -> None:
    layers = []
    for recipe in ("tensorwise", "mxfp8"):
        torch.manual_seed(0)
        layers.append(
            MoELayer(MoEConfig(**{**fields_of(recipe, "e4m3"), "hidden_size": 64, "moe_ffn_hidden_size": 96}))
        )
    x = torch.randn(30, 1, 64)
    alone = [layer(x) for layer in layers]
    with keep_quantized_weights(layers[0]):
        first = layers[0](x)
        second = layers[1](x)
        assert torch.equal(layers[0](x), first)
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("recipe", "fp8"), [kind for kind in ONE_KIND if kind[0] != "nvfp4"])
def test_unquantized_weight_gradients(recipe: str, fp8: str) -> None:
    """fp8_wgrad=False: everything else is the same bit by bit, and weight gradients multiply what forward quantized."""
    results = [run_uneven(build(recipe, fp8, params_dtype=torch.float64, fp8_wgrad=on), recipe) for on in (True, False)]
    for name in ("output", "tokens", "probs"):
        assert torch.equal(results[0][name], results[1][name])
    exact = build(recipe, fp8, params_dtype=torch.float64)
    exact_input = draw_input(exact.config.hidden_size, LOADS["uneven"], RECIPES[recipe].row_multiple)
    seen: list[tuple[Tensor, Tensor]] = []
    original = grouped_gemm.ReferenceGemm.weight_gradient

    def weight_gradient(self: Any, grad: Any, x: Any, out: Tensor) -> None:
        original(self, grad, x, out)
        seen.append((grad.values, x.values))
        for expert, part in self.parts():
            assert_close(out[expert], grad.values[part].t() @ x.values[part], torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm.ReferenceGemm, "weight_gradient", weight_gradient)
        run(
            build(recipe, fp8, params_dtype=torch.float64, fp8_wgrad=False),
            exact_input,
            torch.randn_like(exact_input.tokens),
        )
    assert len(seen) == 2


def run_uneven(experts: GroupedMLP, recipe: str) -> Results:
    """Return what the uneven load gives."""
    expert_input = draw_input(experts.config.hidden_size, LOADS["uneven"], RECIPES[recipe].row_multiple)
    generator = torch.Generator().manual_seed(2)
    return run(experts, expert_input, torch.randn(expert_input.tokens.shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(
    ("recipe", "scale_format"), [("blockwise", "fp32"), ("rowwise", "pow2"), ("tensorwise", "pow2")]
)
def test_the_other_scale_format(recipe: str, scale_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *blocks = quantized_reference.BLOCKS[recipe]
    monkeypatch.setitem(quantized_reference.BLOCKS, recipe, (scale_format, *blocks))
    experts = build(recipe, "hybrid", params_dtype=torch.float64, fp8_scale_format=scale_format)
    expert_input = draw_input(experts.config.hidden_size, LOADS["uneven"], RECIPES[recipe].row_multiple)
    grad = torch.randn(expert_input.tokens.shape, dtype=torch.float64)
    actual = run(experts, expert_input, grad)
    wanted = expected(experts, expert_input, grad, recipe, "hybrid", partial(reference.activation, "silu"))
    for name, value in wanted.items():
        assert_close(actual[name], value, torch.float64, what=name)


@pytest.mark.usefixtures("_dirty_memory")
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biases"), [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_backend_equals_the_reference_backend(
    dtype: torch.dtype, gated: bool, biases: bool, load: str
) -> None:
    """torch.nn.functional.grouped_mm runs on CPU tensors too; probs do not sum to 1, rows feed several experts."""
    fields = {"hidden_size": 48, "moe_ffn_hidden_size": 80, "num_moe_experts": EXPERTS, "init_method_std": 0.2}
    fields |= {"params_dtype": dtype, "gated_linear_unit": gated, "add_bias_linear": biases}
    torch.manual_seed(0)
    reference_experts = GroupedMLP(MoEConfig(**fields))
    for name, parameter in reference_experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    torch_experts = GroupedMLP(MoEConfig(**fields, moe_expert_backend="torch"))
    assert torch_experts.state_dict().keys() == reference_experts.state_dict().keys()
    torch_experts.load_state_dict(reference_experts.state_dict())
    expert_input = draw_input(48, LOADS[load], 1, dtype)
    grad = torch.randn(expert_input.tokens.shape)
    wanted, actual = run(reference_experts, expert_input, grad), run(torch_experts, expert_input, grad)
    for name, value in wanted.items():
        assert_close(actual[name], value, dtype, what=name)


@pytest.mark.parametrize(
    ("hidden", "ffn", "name"), [(46, 80, "hidden size of the experts"), (48, 81, "ffn_hidden_size")]
)
def test_the_torch_backend_refuses_widths_of_odd_bytes(hidden: int, ffn: int, name: str) -> None:
    fields = {"hidden_size": hidden, "moe_ffn_hidden_size": ffn, "num_moe_experts": EXPERTS}
    with pytest.raises(ValueError, match=r"params_dtype \(torch.float64\).*'torch'"):
        GroupedMLP(MoEConfig(**fields, moe_expert_backend="torch", params_dtype=torch.float64))
    with pytest.raises(ValueError, match=rf"{name}.*must be divisible by 8 for moe_expert_backend 'torch' in torch.bf"):
        GroupedMLP(MoEConfig(**fields, moe_expert_backend="torch", params_dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "GEMMs torch.float32 by torch.mm"),
        ({"fp8": "hybrid"}, "GEMMs delayed hybrid, rounded exactly and multiplied in fp32"),
        ({"fp4": "e2m1"}, "GEMMs nvfp4 e2m1, rounded exactly"),
        ({"moe_expert_backend": "torch"}, "by torch.nn.functional.grouped_mm"),
        (
            {"moe_expert_backend": "torch", "fp8": "e4m3", "fp8_recipe": "mxfp8"},
            "mxfp8 e4m3 by torch.nn.functional.scaled_gr",
        ),
    ],
)
def test_a_layer_says_what_multiplies(fields: dict[str, Any], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "prefers_onednn", lambda: False)
    layer = MoELayer(MoEConfig(hidden_size=64, num_moe_experts=4, moe_ffn_hidden_size=64, **fields))
    assert shown in layer.describe()
    assert ("padding     off" in layer.describe()) == (not any(name.startswith("fp") for name in fields))


def test_other_weights_while_some_are_kept_raise_and_a_copy_keeps_none() -> None:
    layer = MoELayer(MoEConfig(**fields_of("tensorwise", "e4m3")))
    x = torch.randn(20, 1, layer.config.hidden_size)
    others = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    with keep_quantized_weights(layer):
        before = layer(x)
        with pytest.raises(RuntimeError, match="linear_fc1 was replaced"):
            torch.func.functional_call(layer, others, (x,))
        twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.experts.linear_fc1.weight.mul_(2)
    assert not torch.equal(twin(x), before)
    with keep_quantized_weights(twin):
        twin(x)


def test_a_block_that_ends_by_an_exception_keeps_nothing() -> None:
    layer = MoELayer(MoEConfig(**fields_of("tensorwise", "e4m3")))
    x = torch.randn(20, 1, layer.config.hidden_size)
    with pytest.raises(ValueError, match="must end in hidden_size"), keep_quantized_weights(layer):
        layer(torch.cat([x, layer(x)], dim=-1))
    with torch.no_grad():
        layer.experts.linear_fc1.weight.mul_(2)
    with keep_quantized_weights(layer):
        layer(x)


@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
@pytest.mark.usefixtures("_half_up")
def test_autocast_does_not_reach_inside(recipe: str, fp8: str) -> None:
    experts = build(recipe, fp8)
    results = []
    for enabled in (False, True):
        expert_input = draw_input(
            experts.config.hidden_size, LOADS["uneven"], RECIPES[recipe].row_multiple, torch.float32
        )
        generator = torch.Generator().manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(run(experts, expert_input, torch.randn(expert_input.tokens.shape, generator=generator)))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


@pytest.mark.parametrize(("recipe", "fp8"), ONE_KIND)
@pytest.mark.usefixtures("_half_up")
def test_padding_tokens_do_not_reach_the_scales(recipe: str, fp8: str) -> None:
    """With a padding_mask the valid tokens come out as if they were alone, whatever the others hold."""
    layer = MoELayer(MoEConfig(**fields_of(recipe, fp8)))
    x = torch.randn(40, 1, layer.config.hidden_size)
    mask = torch.rand(40, 1) < 0.4
    noisy = torch.where(mask.unsqueeze(-1), 1e4 * x, x)
    output, alone = layer(noisy, mask), layer(x[~mask].unsqueeze(1))
    assert torch.equal(output[~mask], alone[:, 0])
    assert not output[mask].any()


def test_gradients_alone_are_rounded_stochastically() -> None:
    experts = build("nvfp4", "")
    results = []
    for seed in (0, 0, 1):
        expert_input = draw_input(48, LOADS["uneven"], 128, torch.float32)
        torch.manual_seed(seed)
        grad = torch.linspace(-1, 1, expert_input.tokens.numel()).view(expert_input.tokens.shape)
        results.append(run(experts, expert_input, grad))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)
        assert torch.equal(results[2][name], value) == (name == "output"), name


def test_scales_of_a_stored_activation_are_powers_of_two() -> None:
    for width in (128, 24):
        stored = store_activation(torch.randn(10, 2, width), how="fp8").quantized
        assert stored is not None
        assert stored.scale.shape == (10, 2 if width == 128 else 1)
        assert (torch.frexp(stored.scale).mantissa == 0.5).all()


def test_unquantized_weight_gradients_keep_the_rows_as_they_are() -> None:
    sizes = {"hidden_size": 256, "moe_ffn_hidden_size": 384, "params_dtype": torch.bfloat16}
    kept = []
    for wgrad in (True, False):
        expert_input = draw_input(256, (256, 128, 0, 0, 0), 16, torch.bfloat16)
        kept.append(saved_bytes(build("tensorwise", "hybrid", **sizes, fp8_wgrad=wgrad), expert_input))
    num_rows, num_slots = 256, 384
    assert kept[1] - kept[0] in range(
        num_rows * 256 * 2 - num_slots * 256 - 64, num_rows * 256 * 2 - num_slots * 256 + 64
    )
