"""The choice and the weights against the oracle; what the fused function saves and how it guards its map."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from router import topk_routing_with_score_function
from tests import reference
from tests.tolerances import assert_close

NUM_EXPERTS = 5
MODES = [("softmax", False), ("softmax", True), ("sigmoid", False)]  # score function, softmax before the choice
CASES = [
    (*mode, topk) for mode in MODES for topk in range(1, NUM_EXPERTS + 1) if (*mode, topk) != ("softmax", False, 1)
]
INFINITY = float("inf")


def _values_and_gradient(route: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, upstream: Tensor):
    logits = logits.clone().requires_grad_()
    probs, routing_map = route(logits)
    (gradient,) = torch.autograd.grad((probs * upstream.to(probs.dtype)).sum(), logits)
    return probs, routing_map, gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize(("score_function", "pre_softmax", "topk"), CASES)
def test_both_paths_equal_the_reference(
    score_function: str, pre_softmax: bool, topk: int, num_tokens: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(num_tokens, NUM_EXPERTS, dtype=dtype) * 2
    upstream = torch.randn(num_tokens, NUM_EXPERTS, dtype=torch.float64)
    expected_probs, expected_map, expected_gradient = _values_and_gradient(
        lambda x: reference.routing(x, topk, score_function=score_function, pre_softmax=pre_softmax),
        logits.double(),
        upstream,
    )
    unfused, fused = (
        _values_and_gradient(
            lambda x, fused=fused: topk_routing_with_score_function(
                x, topk, pre_softmax, score_function=score_function, fused=fused
            ),
            logits,
            upstream,
        )
        for fused in (False, True)
    )
    for probs, routing_map, gradient in (unfused, fused):
        assert probs.dtype == gradient.dtype == dtype
        assert_close(probs, expected_probs, what="probs")
        assert_close(routing_map, expected_map, what="routing_map")
        assert_close(gradient, expected_gradient, what="gradient")
    assert torch.equal(unfused[0], fused[0])


def test_hand_written_rows() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [4.0, 1.0, 4.0]]).log()
    expected = {
        MODES[0]: [[0, 3 / 5, 2 / 5], [1 / 2, 0, 1 / 2]],
        MODES[1]: [[0, 3 / 5, 2 / 5], [4 / 9, 0, 4 / 9]],
        MODES[2]: [[0, 9 / 17, 8 / 17], [1 / 2, 0, 1 / 2]],  # 3/4 and 2/3, then 4/5 twice, over their sum
    }
    for (score_function, pre_softmax), rows in expected.items():
        for fused in (False, True):
            probs, routing_map = topk_routing_with_score_function(
                logits, 2, pre_softmax, score_function=score_function, fused=fused
            )
            assert_close(probs, torch.tensor(rows))
            assert routing_map.tolist() == [[False, True, True], [True, False, True]]


@pytest.mark.parametrize(("score_function", "pre_softmax", "topk"), CASES)
def test_fused_gradient_equals_finite_differences(score_function: str, pre_softmax: bool, topk: int) -> None:
    logits = torch.randn(4, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)

    def fused_probs(x: Tensor) -> Tensor:
        return topk_routing_with_score_function(x, topk, pre_softmax, score_function=score_function, fused=True)[0]

    assert torch.autograd.gradcheck(fused_probs, logits)


def _saved_storages(function: Callable[[], object]) -> dict[int, int]:
    """Return the bytes of every storage that a call saves for backward, by its address."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved


@pytest.mark.parametrize(("score_function", "pre_softmax"), MODES)
def test_fused_saves_its_map_and_one_tensor(score_function: str, pre_softmax: bool) -> None:
    num_tokens, num_experts, topk = 33, 8, 2
    logits = torch.randn(num_tokens, num_experts, requires_grad=True)
    results = []
    saved, saved_fused = (
        _saved_storages(
            lambda fused=fused: results.append(
                topk_routing_with_score_function(logits, topk, pre_softmax, score_function=score_function, fused=fused)
            )
        )
        for fused in (False, True)
    )
    _, routing_map = results[1]
    assert saved_fused.pop(routing_map.data_ptr()) == num_tokens * num_experts
    assert list(saved_fused.values()) == [num_tokens * (num_experts if pre_softmax else topk) * 4]
    assert sum(saved_fused.values()) + num_tokens * num_experts < sum(saved.values())


@pytest.mark.parametrize("write", [lambda x: x.logical_or_(~x), lambda x: x.t()[0].fill_(True)], ids=["all", "view"])
@pytest.mark.parametrize(("score_function", "pre_softmax"), MODES)
def test_writing_the_map_before_a_fused_backward_raises(
    score_function: str, pre_softmax: bool, write: Callable[[Tensor], object]
) -> None:
    logits = torch.randn(7, NUM_EXPERTS, requires_grad=True)
    probs, routing_map = topk_routing_with_score_function(
        logits, 2, pre_softmax, score_function=score_function, fused=True
    )
    write(routing_map)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probs.sum().backward()


@st.composite
def _logits_and_topk(draw: st.DrawFn) -> tuple[Tensor, int]:
    num_experts, num_tokens = draw(st.integers(1, 7)), draw(st.integers(0, 6))
    special = st.sampled_from([0.0, -0.0, 1.0, 3e38, -3e38, -INFINITY])  # sampled often, so that rows have ties
    value = st.one_of(special, st.floats(width=32, allow_nan=False, allow_infinity=False))
    rows = draw(st.lists(st.lists(value, min_size=num_experts, max_size=num_experts), max_size=num_tokens))
    return torch.tensor(rows).view(len(rows), num_experts), draw(st.integers(1, num_experts))


@given(case=_logits_and_topk(), mode=st.sampled_from(MODES))
def test_any_logits_give_exactly_k_experts_a_token(case: tuple[Tensor, int], mode: tuple[str, bool]) -> None:
    logits, topk = case
    score_function, pre_softmax = mode
    if mode == MODES[0] and topk == 1:
        pre_softmax = True
    (probs, routing_map), (fused_probs, fused_map) = (
        topk_routing_with_score_function(logits, topk, pre_softmax, score_function=score_function, fused=fused)
        for fused in (False, True)
    )
    assert routing_map.sum(1).tolist() == [topk] * len(logits)
    lowest_chosen = logits.masked_fill(~routing_map, INFINITY).amin(1)
    assert (lowest_chosen >= logits.masked_fill(routing_map, -INFINITY).amax(1)).all()
    has_finite = logits.amax(1) > -INFINITY
    assert ((probs[has_finite] >= 0) & (probs[has_finite] <= 1.0001)).all()
    assert (probs[has_finite][~routing_map[has_finite]] == 0).all()
    assert torch.equal(routing_map, fused_map)
    torch.testing.assert_close(probs, fused_probs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
def test_sigmoid_normalisation_holds_where_scores_underflow(fused: bool) -> None:
    logits = torch.tensor([[-200.0, -201.0, -202.5], [-50.0, -49.0, -1000.0]])
    upstream = torch.tensor([[1.0, -2.0, 3.0]])
    probs, _, gradient = _values_and_gradient(
        lambda x: topk_routing_with_score_function(x, 2, score_function="sigmoid", fused=fused), logits, upstream
    )
    expected_probs, _, expected_gradient = _values_and_gradient(
        lambda x: reference.routing(x, 2, score_function="sigmoid"), logits.double(), upstream
    )
    assert_close(probs.sum(1), torch.ones(2))
    assert_close(probs, expected_probs)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("shape", "topk", "options", "message"),
    [
        ((7, 5), 0, {}, r"topk \(0\) must lie between 1 and the number of experts \(5\)"),
        ((7, 5), 6, {}, r"topk \(6\) must lie between 1 and the number of experts \(5\)"),
        ((7, 3, 5), 2, {}, r"logits \(\(7, 3, 5\)\) must have two dimensions"),
        ((7, 5), 2, {"score_function": "tanh"}, r"score_function \('tanh'\) must be 'softmax' or 'sigmoid'"),
        ((7, 5), 2, {"score_function": "sigmoid", "use_pre_softmax": True}, r"use_pre_softmax \(True\).*'sigmoid'"),
        ((7, 5), 1, {}, r"topk \(1\) with softmax after the choice has no gradient; use_pre_softmax=True or 'sigmoid'"),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_refused_arguments(
    shape: tuple[int, ...], topk: int, options: dict[str, object], message: str, fused: bool
) -> None:
    with pytest.raises(ValueError, match=message):
        topk_routing_with_score_function(torch.randn(shape), topk, fused=fused, **options)
