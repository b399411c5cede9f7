"""ExpertChoiceRouter: equal loads, the best tokens of each expert, gradients, and a layer built on it."""

import math

import pytest
import torch
from torch import Tensor

from moe import MoEConfig, MoELayer
from router import ExpertChoiceRouter, RouterConfig
from tests import reference
from tests.tolerances import assert_close

EXACT = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", "moe_router_type": "expert_choice"}


def _router(**fields: object) -> ExpertChoiceRouter:
    torch.manual_seed(0)
    config = RouterConfig(hidden_size=6, num_moe_experts=5, init_method_std=1.0, **EXACT, **fields)
    return ExpertChoiceRouter(config)


def _hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("topk", "factor", "scale"), [(1, None, None), (2, None, 2.5), (2, 0.5, None), (5, 2.0, None)])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_each_expert_takes_its_best_tokens(
    num_tokens: int, topk: int, factor: float | None, scale: float | None, score_function: str
) -> None:
    router = _router(
        moe_router_topk=topk,
        moe_expert_capacity_factor=factor,
        moe_router_topk_scaling_factor=scale,
        moe_router_score_function=score_function,
    )
    hidden = _hidden(num_tokens).requires_grad_()
    probs, routing_map = router(hidden)
    scores = reference.scores_of(hidden @ router.weight.t(), score_function) * (scale or 1.0)
    capacity = min(num_tokens, math.ceil(num_tokens * topk / 5 * (factor or 1.0)))
    assert routing_map.sum(0).tolist() == [capacity] * 5
    assert torch.equal(routing_map, reference.largest(scores.t(), capacity).t())
    assert_close(probs, scores * routing_map)
    upstream = torch.linspace(-1, 1, 5, dtype=torch.float64)
    leaves = [hidden, router.weight]
    for actual, expected in zip(
        torch.autograd.grad((probs * upstream).sum(), leaves),
        torch.autograd.grad((scores * routing_map * upstream).sum(), leaves),
        strict=True,
    ):
        assert_close(actual, expected)
    assert router.tokens_per_expert.tolist() == [capacity] * 5


def test_padding_and_nan_take_no_place() -> None:
    router, hidden = _router(moe_z_loss_coeff=0.1), _hidden(11, 3)
    padding = torch.rand(11, 3, generator=torch.Generator().manual_seed(4)) < 0.4
    probs, routing_map = router(hidden.masked_fill(padding.unsqueeze(-1), torch.nan), padding)
    alone, alone_map = router(hidden[~padding])
    assert torch.equal(routing_map[~padding.flatten()], alone_map)
    assert_close(probs[~padding.flatten()], alone)
    assert not probs[padding.flatten()].any()
    spoilt = hidden[~padding]
    spoilt[0] = torch.nan
    probs, routing_map = router(spoilt)
    assert not routing_map[0].any()
    assert probs.isfinite().all()


def test_a_layer_equals_the_reference() -> None:
    config = MoEConfig(hidden_size=6, num_moe_experts=5, moe_ffn_hidden_size=7, init_method_std=1.0, **EXACT)
    torch.manual_seed(0)
    layer, hidden = MoELayer(config), _hidden(8, 2).requires_grad_()
    output = layer(hidden)
    probs, routing_map = layer.router(hidden)
    fc1, fc2 = layer.experts.linear_fc1.weight, layer.experts.linear_fc2.weight
    tokens = hidden.view(-1, 6)
    expected = reference.experts(tokens, probs, routing_map, fc1, fc2, lambda x: reference.activation("silu", x))
    assert_close(output, expected.view_as(output))
    leaves = [hidden, *layer.parameters()]
    for actual, wanted in zip(
        torch.autograd.grad(output.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        assert_close(actual, wanted)
    assert "ExpertChoiceRouter" in repr(layer)
