"""GroupedMLP: values, what it saves, what it leaves in the graph, initial values, refusals."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from dispatchers.base import ExpertInput
from moe.config import MoEConfig
from moe.experts import GroupedMLP
from tests import reference
from tests.tolerances import assert_close

ROWS, HIDDEN, FFN, EXPERTS = 13, 12, 7, 5


def build(**fields: object) -> GroupedMLP:
    config = MoEConfig(
        **{
            "hidden_size": HIDDEN,
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": FFN,
            "init_method_std": 0.3,
            **fields,
        }
    )
    experts = GroupedMLP(config)
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return experts


def draw_input(dtype: torch.dtype, num_padding: int = 0) -> tuple[ExpertInput, Tensor]:
    """Rows that go to some experts each, none to expert 2; returns the routing map [R, E] too."""
    routing_map = torch.rand(ROWS, EXPERTS) < 0.5
    routing_map[:, 2] = False
    segments = [torch.cat([c.nonzero().flatten(), torch.full((num_padding,), -1)]) for c in routing_map.T]
    row_ids, counts = torch.cat(segments), tuple(len(ids) for ids in segments)
    probs = torch.rand(len(row_ids), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return (
        ExpertInput(
            tokens=torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_(),
            row_ids=row_ids,
            probs=probs.masked_fill(row_ids < 0, 0).requires_grad_(),
            tokens_per_expert=torch.tensor(counts),
            tokens_per_expert_list=counts,
            has_padding=num_padding > 0,
        ),
        routing_map,
    )


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_equals_the_reference(gated: bool, biases: bool, num_padding: int) -> None:
    experts = build(params_dtype=torch.float64, add_bias_linear=biases, gated_linear_unit=gated, activation_func="gelu")
    expert_input, routing_map = draw_input(torch.float64, num_padding)
    real = expert_input.row_ids >= 0
    expert_ids = torch.arange(EXPERTS).repeat_interleave(expert_input.tokens_per_expert)
    dense = torch.zeros(ROWS, EXPERTS, dtype=torch.float64)
    dense = dense.index_put((expert_input.row_ids[real], expert_ids[real]), expert_input.probs[real])
    fc1, fc2 = experts.linear_fc1, experts.linear_fc2
    activation = partial(reference.activation, "gelu")
    expected = reference.experts(
        expert_input.tokens, dense, routing_map, fc1.weight, fc2.weight, activation, fc1.bias, fc2.bias
    )
    actual, leaves = experts(expert_input), [expert_input.tokens, expert_input.probs, *experts.parameters()]
    grad = torch.randn_like(actual)
    assert_close(actual, expected, what="output")
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    for actual_grad, expected_grad in zip(torch.autograd.grad(actual, leaves, grad), expected_grads, strict=True):
        assert_close(actual_grad, expected_grad)


def saved_bytes(module: torch.nn.Module, *args: object) -> int:
    """Bytes of distinct storages that autograd keeps for backward, the parameters' own not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*args)
    assert output.requires_grad
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_bytes(dtype: torch.dtype, gated: bool, biases: bool, num_padding: int) -> None:
    """R H size (tokens) + M G F size (first GEMM's output) + 8 M (row_ids) + 4 M (probs), and nothing else."""
    experts = build(params_dtype=dtype, gated_linear_unit=gated, add_bias_linear=biases)
    expert_input, _ = draw_input(dtype, num_padding)
    slots, inputs = expert_input.row_ids.shape[0], 2 if gated else 1
    formula = ROWS * HIDDEN * dtype.itemsize + slots * inputs * FFN * dtype.itemsize + 8 * slots + 4 * slots
    assert saved_bytes(experts, expert_input) == formula


@pytest.mark.parametrize("num_experts", [5, 40])
def test_no_weight_is_indexed_under_autograd(num_experts: int) -> None:
    """Each index of a weight would make a gradient of all experts' size: quadratic cost in their number."""
    experts = build(num_moe_experts=num_experts, add_bias_linear=True)
    expert_input, _ = draw_input(torch.float32)
    counts = expert_input.tokens_per_expert_list + (0,) * (num_experts - EXPERTS)
    expert_input = replace(expert_input, tokens_per_expert_list=counts, tokens_per_expert=torch.tensor(counts))
    nodes, pending = set(), [experts(expert_input).grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending.extend(following for following, _ in node.next_functions)
    # One node that computes, and one for each of tokens, probs, two weights and two biases.
    assert sorted(node.name() for node in nodes) == ["_ExpertMLPBackward"] + 6 * ["torch::autograd::AccumulateGrad"]


def test_initial_values_depend_on_the_seed_and_the_global_expert_alone() -> None:
    def weights(num_experts: int, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        experts = GroupedMLP(
            MoEConfig(hidden_size=40, num_moe_experts=num_experts, moe_ffn_hidden_size=30, add_bias_linear=True)
        )
        assert not experts.linear_fc1.bias.any()
        assert not experts.linear_fc2.bias.any()
        return [experts.linear_fc1.weight, experts.linear_fc2.weight]

    for few, many, other in zip(weights(3, 1), weights(8, 1), weights(3, 2), strict=True):
        assert torch.equal(few, many[:3])
        assert not torch.isclose(few, other).any(dim=-1).all()
        assert len({round(expert.sum().item(), 6) for expert in many}) == 8
        assert abs(many.std().item() / 0.02 - 1) < 0.05


def test_a_wrong_input_is_refused_with_its_values() -> None:
    experts = build()
    expert_input, _ = draw_input(torch.float32)
    with pytest.raises(ValueError, match=r"\[13, 12\], torch.bfloat16.*width 12.*torch.float32"):
        experts(replace(expert_input, tokens=expert_input.tokens.bfloat16()))
    with pytest.raises(ValueError, match=r"\[13, 11\].*width 12"):
        experts(replace(expert_input, tokens=expert_input.tokens[:, 1:]))
    with pytest.raises(ValueError, match=r"6 entries.*local expert \(5\)"):
        experts(replace(expert_input, tokens_per_expert_list=(*expert_input.tokens_per_expert_list, 0)))


def test_print_shows_shapes_and_what_multiplies() -> None:
    text = str(build(add_bias_linear=True).double())
    assert "local_experts=5" in text
    assert "weight=[5, 2, 7, 12], bias=[5, 2, 7], dtype=torch.float64" in text
    assert "GEMMs torch.float64 by torch.mm" in text
    assert "weight=[5, 12, 7], bias=[5, 12]" in text


def test_backward_inside_autocast_computes_the_same() -> None:
    experts = build(add_bias_linear=True)
    expert_input, _ = draw_input(torch.float32)
    leaves = [expert_input.tokens, expert_input.probs, *experts.parameters()]
    grads = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = experts(expert_input)
            grads.append(torch.autograd.grad(output, leaves, torch.linspace(-1, 1, output.numel()).view(output.shape)))
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
