"""The calls into Transformer Engine's router kernels, on a stand-in with their signatures and the reference's math."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from router import switch_load_balancing_loss_func
from router.losses import loss_scores
from router.scores import RoutingRule
from router.topk import route
from tests import reference
from tests.tolerances import assert_close

calls: list[str] = []


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: str = "bytemap",
) -> tuple[Tensor, Tensor]:
    calls.append("topk")
    assert logits.dtype != torch.float64
    assert logits.is_contiguous()
    return reference.routing(
        logits,
        topk,
        score_function=score_function,
        pre_softmax=use_pre_softmax,
        expert_bias=expert_bias,
        scaling_factor=scaling_factor,
        num_groups=num_groups,
        group_topk=group_topk,
    )


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str, routing_map_format: str = "bytemap"
) -> tuple[Tensor, Tensor]:
    calls.append("scores")
    assert logits.is_contiguous()
    scores = torch.softmax(reference.log_scores(logits, score_function), -1)
    return reference.largest(scores, topk), scores


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    calls.append("loss")
    assert tokens_per_expert.dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16)
    assert isinstance(total_num_tokens, int) or (total_num_tokens.dtype, total_num_tokens.dim()) == (torch.int64, 0)
    shares = tokens_per_expert / (topk * total_num_tokens)
    return coeff * num_experts * (shares * probs.sum(0) / total_num_tokens).sum()


@pytest.fixture(autouse=True)
def _transformer_engine() -> Iterator[None]:
    module = types.ModuleType("transformer_engine.pytorch.router")
    for function in (fused_topk_with_score_function, fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss):
        setattr(module, function.__name__, function)
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.router"]
    before = {name: sys.modules.get(name) for name in (*names, "router.fused_te")}
    sys.modules.update(dict.fromkeys(names, module))
    sys.modules.pop("router.fused_te", None)
    calls.clear()
    yield
    for name, kept in before.items():
        if kept is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = kept


def _logits(num_tokens: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


RULES = [
    (RoutingRule(2), None),
    (RoutingRule(3, use_pre_softmax=True, scaling_factor=2.5), None),
    (RoutingRule(4, num_groups=4, group_topk=2, score_function="sigmoid"), torch.linspace(-1, 1, 8)),
    (RoutingRule(4, num_groups=4, group_topk=2, group_score_topk=2, score_function="sqrtsoftplus"), None),
]


@pytest.mark.parametrize(("rule", "bias"), RULES)
def test_the_kernel_decides_as_the_plain_path(rule: RoutingRule, bias: Tensor | None) -> None:
    wide = _logits()
    for logits in (wide, wide.t().contiguous().t()):
        expected = route(logits, rule, bias)
        probs, routing_map = route(logits, rule, bias, backend="te")
        assert torch.equal(routing_map, expected[1])
        assert_close(probs, expected[0])
    assert calls == ["topk"] * 2


def test_what_the_kernel_cannot_take_goes_another_way() -> None:
    for logits, rule, ids in (
        (_logits(dtype=torch.float64), RoutingRule(2), None),
        (_logits(0), RoutingRule(2), None),
        (_logits(), RoutingRule(2), torch.tensor([[0, 1]] * 9)),
        (_logits(), RoutingRule(4, num_groups=4, group_topk=2, group_score_topk=1), None),
    ):
        expected = route(logits, rule, None, ids)
        assert all(map(torch.equal, route(logits, rule, None, ids, backend="te"), expected))
    for logits in (_logits(dtype=torch.float64), _logits(0)):
        assert all(
            map(
                torch.equal,
                loss_scores(logits, 2, "sigmoid", backend="te"),
                loss_scores(logits, 2, "sigmoid", backend=None),
            )
        )
    assert calls == []


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_loss_scores_come_from_the_kernel(score_function: str) -> None:
    expected = loss_scores(_logits(), 2, score_function, backend=None)
    routing_map, scores = loss_scores(_logits(), 2, score_function, backend="te")
    assert torch.equal(routing_map, expected[0])
    assert_close(scores, expected[1])
    assert calls == ["scores"]


@pytest.mark.parametrize("total", [9, torch.tensor(9), torch.tensor(9.0, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("counts_dtype", [torch.int64, torch.float64], ids=str)
def test_the_loss_comes_from_the_kernel(counts_dtype: torch.dtype, total: int | Tensor) -> None:
    from router.fused_te import fused_aux_loss

    scores, counts = _logits().softmax(-1), torch.arange(8).to(counts_dtype)
    expected = switch_load_balancing_loss_func(scores, counts, total, 2, 8, 0.3)
    assert_close(fused_aux_loss(scores, counts, total, 2, 8, 0.3), expected)
    assert calls == ["loss"]
