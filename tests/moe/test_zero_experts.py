"""Zero-computation experts: what each kind gives, gradients, and the layer with a varying number of real experts."""

import pytest
import torch
from torch import Tensor

from moe import MoEConfig, MoELayer, ZeroComputationExperts
from tests import reference
from tests.tolerances import assert_close

SIZES = {"hidden_size": 6, "num_moe_experts": 4, "moe_ffn_hidden_size": 7, "init_method_std": 1.0}
EXACT = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
KINDS = [(0, 1, 0), (2, 0, 0), (0, 0, 3), (1, 2, 2)]  # null, identity, constant


def _config(kinds: tuple[int, int, int], **fields: object) -> MoEConfig:
    names = ("moe_num_null_experts", "moe_num_identity_experts", "moe_num_constant_experts")
    return MoEConfig(**SIZES, **{**EXACT, **fields}, **dict(zip(names, kinds, strict=True)))


def _by_loop(experts: ZeroComputationExperts, hidden: Tensor, probs: Tensor, kinds: tuple[int, int, int]) -> Tensor:
    rows = []
    for token, weights in zip(hidden, probs, strict=True):
        row = token * 0
        for j in range(kinds[1]):
            row = row + weights[kinds[0] + j] * token
        for j in range(kinds[2]):
            gate = torch.softmax(torch.stack([experts.gate[j, 0] @ token, experts.gate[j, 1] @ token]), 0)
            row = row + weights[kinds[0] + kinds[1] + j] * (gate[0] * token + gate[1] * experts.constant[j])
        rows.append(row)
    return torch.stack(rows) if rows else hidden * 0


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 9])
def test_each_kind_equals_the_loop(kinds: tuple[int, int, int], num_tokens: int) -> None:
    torch.manual_seed(1)
    experts = ZeroComputationExperts(_config(kinds))
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(num_tokens, sum(kinds), dtype=torch.float64, requires_grad=True)
    output, expected = experts(hidden, probs), _by_loop(experts, hidden, probs, kinds)
    assert_close(output, expected)
    leaves = [hidden, probs, *experts.parameters()]
    assert len(leaves) == (4 if kinds[2] else 2)
    grads = [
        torch.autograd.grad(value.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        for value in (output, expected)
    ]
    for actual, wanted in zip(*grads, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("fields", [{}, {"moe_router_fusion": True, "moe_layer_recompute": True}], ids=str)
def test_a_layer_has_fewer_real_experts_where_zero_ones_are_chosen(
    fields: dict[str, object], kinds: tuple[int, int, int]
) -> None:
    torch.manual_seed(2)
    layer = MoELayer(_config(kinds, moe_aux_loss_coeff=0.1, **fields))
    hidden = torch.randn(9, 2, 6, dtype=torch.float64, requires_grad=True)
    output = layer(hidden)
    tokens = hidden.view(-1, 6)
    logits = tokens @ layer.router.weight.t()
    probs, routing_map = reference.routing(logits, 2)
    assert set(routing_map[:, :4].sum(1).tolist()) == {2, 1, 2 - min(2, sum(kinds))}
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    real = reference.experts(
        tokens, probs[:, :4], routing_map[:, :4], fc1, fc2, lambda x: reference.activation("silu", x)
    )
    expected = (real + _by_loop(layer.zero_experts, tokens, probs[:, 4:], kinds)).view_as(output)
    assert_close(output, expected)
    leaves = [hidden, *layer.parameters()]
    objective = expected.square().sum() + reference.aux_loss(logits, 2, 0.1)
    grads = [
        torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        for value in (output.square().sum(), objective)
    ]
    for actual, wanted in zip(*grads, strict=True):
        assert_close(actual, wanted)


def test_bf16_tokens_are_summed_in_the_dtype_of_probs() -> None:
    experts = ZeroComputationExperts(_config((0, 2, 1), params_dtype=torch.bfloat16))
    hidden, probs = torch.randn(9, 6).bfloat16(), torch.rand(9, 3)
    expected = _by_loop(experts.double(), hidden.double(), probs.double(), (0, 2, 1))
    output = experts.bfloat16()(hidden, probs)
    assert output.dtype == torch.bfloat16
    assert_close(output, expected)


def test_all_tokens_on_zero_experts_leave_zero_gradients() -> None:
    layer = MoELayer(_config((1, 1, 0), add_bias_linear=True))
    with torch.no_grad():
        layer.router.bias.copy_(torch.tensor([-99.0] * 4 + [0.0] * 2))
    hidden = torch.randn(5, 2, 6, dtype=torch.float64)
    layer(hidden).sum().backward()
    for name, parameter in layer.experts.named_parameters():
        assert not parameter.grad.any(), name
    assert layer.router.tokens_per_expert.tolist() == [0, 0, 0, 0, 10, 10]
    assert "null=1, identity=1, constant=0" in layer.describe()


def test_autocast_does_not_reach_inside() -> None:
    experts = ZeroComputationExperts(_config((0, 1, 2), params_dtype=torch.float32))
    hidden, probs = torch.randn(9, 6), torch.rand(9, 3)
    expected = experts(hidden, probs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(experts(hidden, probs), expected)
