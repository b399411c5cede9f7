"""Transformer Engine's own Python of the fused router, on emulated bindings: our calls fit it, gradients flow through.

Its kernels need a GPU; what runs here is everything above them, from the wheel's router.py.
"""

import importlib.util
import sys
import types
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
import torch
from torch import Tensor

from router.losses import loss_scores
from router.scores import RoutingRule
from router.topk import route
from tests import reference
from tests.parity import megatron
from tests.tolerances import assert_close

SOURCE = megatron.FOLDER.parent / "transformer_engine" / "transformer_engine" / "pytorch" / "router.py"


class RoutingMapFormat(IntEnum):
    BYTEMAP = 0
    BITMAP_U8 = 1


class HistogramMode(IntEnum):
    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


def bindings() -> types.ModuleType:
    """Return a transformer_engine_torch whose kernels are the reference's loops."""
    tex = types.ModuleType("transformer_engine_torch")
    tex.NVTERoutingMapFormat, tex.NVTEQBHistogramMode = RoutingMapFormat, HistogramMode

    def topk_fwd(logits, topk, pre_softmax, num_groups, group_topk, scaling, function, bias, map_format, indices):
        assert (map_format, indices) == (0, None)
        options = {"score_function": function, "pre_softmax": pre_softmax, "scaling_factor": scaling}
        groups = {"num_groups": num_groups, "group_topk": group_topk}
        return *reference.routing(logits, topk, expert_bias=bias, **options, **groups), logits

    def topk_bwd(routing_map, logits, grad_probs, grad_logits, topk, pre_softmax, scaling, function, dense, map_format):
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            probs = reference.weights_on_map(leaf, routing_map, topk, function, pre_softmax, scaling)
        grad_logits.copy_(torch.autograd.grad(probs, leaf, grad_probs)[0])

    def scores_of(logits: Tensor, function: str) -> Tensor:
        return torch.softmax(reference.log_scores(logits, function), -1)

    def scores_fwd(*, logits, topk, score_function, routing_map_format):
        scores = scores_of(logits, score_function)
        return scores, reference.largest(scores, topk), logits

    def scores_bwd(*, intermediate_output, grad_scores, grad_logits, topk, score_function):
        leaf = intermediate_output.detach().requires_grad_()
        with torch.enable_grad():
            scores = scores_of(leaf, score_function)
        grad_logits.copy_(torch.autograd.grad(scores, leaf, grad_scores)[0])

    def loss_fwd(*, probs, tokens_per_expert, total_num_tokens, num_experts, num_rows, num_cols, topk, coeff):
        scale = torch.as_tensor(coeff * num_experts / (topk * total_num_tokens * total_num_tokens))
        return (probs.sum(0) * tokens_per_expert).sum() * scale, scale

    def loss_bwd(*, Const_buf, tokens_per_expert, num_rows, num_cols, grad_aux_loss):  # their name
        return (tokens_per_expert * Const_buf * grad_aux_loss).expand(num_rows, num_cols)

    tex.fused_topk_with_score_function_fwd, tex.fused_topk_with_score_function_bwd = topk_fwd, topk_bwd
    tex.fused_score_for_moe_aux_loss_fwd, tex.fused_score_for_moe_aux_loss_bwd = scores_fwd, scores_bwd
    tex.fused_moe_aux_loss_fwd = tex.fused_moe_aux_loss_fwd_graph_safe = loss_fwd
    tex.fused_moe_aux_loss_bwd = loss_bwd
    return tex


@pytest.fixture(autouse=True)
def _transformer_engine() -> Iterator[None]:
    """Put the wheel's router.py where `router.fused_te` imports it from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformer_engine_torch", bindings())
        for name in ("transformer_engine", "transformer_engine.pytorch"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        name = "transformer_engine.pytorch.router"
        spec = importlib.util.spec_from_file_location(name, Path(SOURCE))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "router.fused_te", raising=False)
        yield
    sys.modules.pop("router.fused_te", None)


RULES = [
    (RoutingRule(2), None),
    (RoutingRule(3, use_pre_softmax=True, scaling_factor=2.5), None),
    (RoutingRule(1, score_function="sigmoid"), None),
    (RoutingRule(4, num_groups=4, group_topk=2, score_function="sigmoid"), torch.linspace(-1, 1, 8)),
    (RoutingRule(4, num_groups=4, group_topk=2, group_score_topk=2, score_function="sqrtsoftplus"), None),
]


@pytest.mark.parametrize(("rule", "bias"), RULES)
def test_decision_and_gradient(rule: RoutingRule, bias: Tensor | None) -> None:
    logits, upstream = torch.randn(9, 8, requires_grad=True), torch.randn(9, 8)
    results = []
    for backend in ("te", None):
        probs, routing_map = route(logits, rule, bias, backend=backend)
        (gradient,) = torch.autograd.grad((probs * upstream).sum(), logits)
        results.append((probs, routing_map, gradient))
    assert results[0][0].grad_fn.name() == "FusedTopkScoreFunctionBackward"
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_and_loss_with_gradient(score_function: str) -> None:
    from router.fused_te import fused_aux_loss
    from router.losses import switch_load_balancing_loss_func

    logits, results = torch.randn(9, 8, requires_grad=True), []
    for backend, loss_function in (("te", fused_aux_loss), (None, switch_load_balancing_loss_func)):
        routing_map, scores = loss_scores(logits, 2, score_function, backend=backend)
        loss = loss_function(scores, routing_map.sum(0), torch.tensor(9), 2, 8, 0.3)
        results.append((routing_map, scores, loss, torch.autograd.grad(loss, logits)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
