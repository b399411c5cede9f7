"""The choice and the weights against the oracle; what the fused function saves."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from router import group_limited_topk, topk_routing_with_score_function
from tests import reference
from tests.tolerances import assert_close

NUM_EXPERTS = 5
MODES = [
    ("softmax", False),
    ("softmax", True),
    ("sigmoid", False),
    ("sqrtsoftplus", False),
]  # score function, softmax before the choice
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


@st.composite
def _options(draw: st.DrawFn) -> tuple[int, dict[str, object]]:
    """Draw a number of experts and the options of a decision that fit it."""
    score_function, pre_softmax = draw(st.sampled_from(MODES))
    num_groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    group_topk = draw(st.none() | st.integers(1, num_groups))
    lowest = 1 if group_topk is None else group_topk
    topk = draw(st.integers(lowest, min(lowest * size, 6) if group_topk else num_groups * size))
    pre_softmax = pre_softmax or (topk == 1 and score_function == "softmax")
    options = {
        "topk": topk,
        "score_function": score_function,
        "use_pre_softmax": pre_softmax,
        "scaling_factor": draw(st.sampled_from([None, 2.5])),
    }
    if group_topk is not None:
        options |= {"num_groups": num_groups, "group_topk": group_topk}
    if score_function != "softmax" and draw(st.booleans()):
        options["expert_bias"] = draw(st.sampled_from([0.3, -5.0]))
    return num_groups * size, options


@given(case=_options(), seed=st.integers(0, 1000), num_tokens=st.integers(0, 9))
def test_every_combination_of_options_equals_the_reference(
    case: tuple[int, dict[str, object]], seed: int, num_tokens: int
) -> None:
    num_experts, options = case
    generator = torch.Generator().manual_seed(seed)
    logits, upstream = torch.randn(2, num_tokens, num_experts, generator=generator, dtype=torch.float64).unbind()
    if "expert_bias" in options:  # scores plus this are negative for -5
        offset = options["expert_bias"]
        options = {**options, "expert_bias": offset + torch.randn(num_experts, generator=generator) * 0.3}
    names = {"use_pre_softmax": "pre_softmax"}
    expected = _values_and_gradient(
        lambda x: reference.routing(x, **{names.get(name, name): value for name, value in options.items()}),
        logits,
        upstream,
    )
    results = []
    for fused in (False, True):
        result = _values_and_gradient(
            lambda x, fused=fused: topk_routing_with_score_function(x, **options, fused=fused), logits, upstream
        )
        assert torch.equal(result[1], expected[1])
        assert_close(result[0], expected[0], what="probs")
        assert_close(result[2], expected[2], what="gradient")
        results.append(result)
    assert torch.equal(results[0][0], results[1][0])


def test_group_score_is_the_sum_of_the_best_and_negative_scores_stay_out() -> None:
    scores = torch.tensor([[-9.0, -1.0, -5.0, -4.0, -8.0, -7.0]])  # groups (-9, -1), (-5, -4), (-8, -7)
    best_one, ids = group_limited_topk(scores, 2, 1, 6, 3, 1, group_score_topk=1)
    assert (ids.tolist(), best_one.tolist()) == ([[1, 0]], [[-1.0, -9.0]])  # the group of the maximum, though -9 is low
    assert group_limited_topk(scores, 2, 1, 6, 3, 1)[1].tolist() == [[3, 2]]  # the best sum of two
    assert group_limited_topk(scores, 3, 1, 6, 3, 2, group_score_topk=2)[1].tolist() == [[1, 3, 2]]


@pytest.mark.parametrize("fused", [False, True])
def test_the_bias_changes_the_choice_alone(fused: bool) -> None:
    logits, bias = torch.randn(33, NUM_EXPERTS, dtype=torch.float64), torch.tensor([9.0, 0, 0, 0, 9])
    probs, routing_map = topk_routing_with_score_function(
        logits, 2, score_function="sigmoid", expert_bias=bias, fused=fused
    )
    assert routing_map.tolist() == [[True, False, False, False, True]] * 33
    expected = reference.weights_on_map(logits, routing_map, 2, "sigmoid")
    assert_close(probs, expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("score_function", "pre_softmax", "topk"), CASES)
def test_a_given_choice_is_weighted_with_its_gradient(
    score_function: str, pre_softmax: bool, topk: int, fused: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, upstream, order = torch.randn(3, 9, NUM_EXPERTS, generator=generator, dtype=torch.float64).unbind()
    ids = order.argsort(-1)[:, :topk]
    routing_map = torch.zeros(9, NUM_EXPERTS, dtype=torch.bool).scatter(1, ids, True)
    expected = _values_and_gradient(
        lambda x: (reference.weights_on_map(x, routing_map, topk, score_function, pre_softmax), routing_map),
        logits,
        upstream,
    )
    actual = _values_and_gradient(
        lambda x: topk_routing_with_score_function(
            x, topk, pre_softmax, score_function=score_function, fused=fused, precomputed_indices=ids
        ),
        logits,
        upstream,
    )
    assert torch.equal(actual[1], routing_map)
    assert_close(actual[0], expected[0])
    assert_close(actual[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_narrow_logits_are_computed_in_fp32(fused: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(33, NUM_EXPERTS).to(dtype)
    probs, routing_map = topk_routing_with_score_function(logits, 3, scaling_factor=2.5, fused=fused)
    wide, wide_map = topk_routing_with_score_function(logits.float(), 3, scaling_factor=2.5, fused=fused)
    assert probs.dtype == dtype
    assert torch.equal(probs, wide.to(dtype))
    assert torch.equal(routing_map, wide_map)


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, -1e30, 1e30, INFINITY, -INFINITY, float("nan")]), min_size=6, max_size=6),
        min_size=1,
        max_size=6,
    ),
    mode=st.sampled_from(MODES),
    grouped=st.booleans(),
    biased=st.booleans(),
)
def test_ids_are_unique_and_rows_decide_for_themselves(
    rows: list[list[float]], mode: tuple[str, bool], grouped: bool, biased: bool
) -> None:
    score_function, pre_softmax = mode
    options: dict[str, object] = {"use_pre_softmax": pre_softmax, "score_function": score_function}
    if grouped:
        options |= {"num_groups": 3, "group_topk": 2}
    if biased and score_function != "softmax":
        options["expert_bias"] = torch.linspace(-1, 1, 6)
    logits = torch.tensor(rows)
    clean = torch.randn(1, 6, generator=torch.Generator().manual_seed(3))
    expected = topk_routing_with_score_function(clean, 2, **options)
    for fused in (False, True):
        together = torch.cat([logits, clean]).requires_grad_()
        probs, routing_map = topk_routing_with_score_function(together, 2, **options, fused=fused)
        assert routing_map.sum(1).tolist() == [2] * (len(rows) + 1)
        if grouped:
            assert (routing_map.view(-1, 3, 2).any(-1).sum(1) <= 2).all()
        assert torch.equal(probs[-1:], expected[0])
        assert torch.equal(routing_map[-1:], expected[1])
        (gradient,) = torch.autograd.grad((probs * torch.arange(1.0, 7)).sum(), together)
        assert torch.isfinite(gradient[-1]).all()


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
@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}], ids=str)
def test_fused_saves_short_ids_weights_and_slopes(
    options: dict[str, object], score_function: str, pre_softmax: bool
) -> None:
    num_tokens, num_experts, topk = 33, 8, 2
    logits = torch.randn(num_tokens, num_experts, requires_grad=True)
    saved, saved_fused = (
        _saved_storages(
            lambda fused=fused: topk_routing_with_score_function(
                logits, topk, pre_softmax, score_function=score_function, fused=fused, **options
            )
        )
        for fused in (False, True)
    )
    kept = num_tokens * (num_experts if pre_softmax else topk) * 4
    slopes = [] if score_function == "softmax" else [kept]
    assert sorted(saved_fused.values()) == sorted([num_tokens * topk * 2, kept, *slopes])
    assert sum(saved_fused.values()) < sum(saved.values())


@pytest.mark.parametrize("num_experts", [40, 40000])
def test_short_ids_hold_every_expert(num_experts: int) -> None:
    logits = torch.randn(3, num_experts, dtype=torch.float64)
    logits[:, -1] = logits.amax(1) + 0.5
    upstream = torch.randn(3, num_experts, dtype=torch.float64)
    gradients = [
        _values_and_gradient(
            lambda x, fused=fused: topk_routing_with_score_function(x, 2, fused=fused), logits, upstream
        )[2]
        for fused in (False, True)
    ]
    assert gradients[0][:, -1].abs().min() > 0
    assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("write", [lambda x: x.logical_or_(~x), lambda x: x.t()[0].fill_(True)], ids=["all", "view"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("score_function", "pre_softmax"), MODES)
def test_no_write_into_the_map_reaches_backward(
    score_function: str, pre_softmax: bool, fused: bool, write: Callable[[Tensor], object]
) -> None:
    logits, upstream = torch.randn(2, 7, NUM_EXPERTS, dtype=torch.float64).unbind()

    def spoilt(x: Tensor) -> tuple[Tensor, Tensor]:
        probs, routing_map = topk_routing_with_score_function(
            x, 2, pre_softmax, score_function=score_function, fused=fused
        )
        write(routing_map)
        return probs, routing_map

    expected = reference.routing(logits.requires_grad_(), 2, score_function=score_function, pre_softmax=pre_softmax)[0]
    (gradient,) = torch.autograd.grad((expected * upstream).sum(), logits)
    assert_close(_values_and_gradient(spoilt, logits.detach(), upstream)[2], gradient)


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
    is_bounded = topk > 1 or score_function != "sqrtsoftplus"
    assert ((probs[has_finite] >= 0) & (probs[has_finite] <= (1.0001 if is_bounded else INFINITY))).all()
    assert (probs[has_finite][~routing_map[has_finite]] == 0).all()
    assert torch.equal(routing_map, fused_map)
    torch.testing.assert_close(probs, fused_probs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_normalisation_holds_where_scores_underflow(score_function: str, fused: bool) -> None:
    logits = torch.tensor([[-200.0, -201.0, -202.5], [-50.0, -49.0, -1000.0]])
    upstream = torch.tensor([[1.0, -2.0, 3.0]])
    probs, _, gradient = _values_and_gradient(
        lambda x: topk_routing_with_score_function(x, 2, score_function=score_function, fused=fused), logits, upstream
    )
    expected_probs, _, expected_gradient = _values_and_gradient(
        lambda x: reference.routing(x, 2, score_function=score_function), logits.double(), upstream
    )
    assert_close(probs.sum(1), torch.ones(2))
    assert_close(probs, expected_probs)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_a_single_expert_has_a_finite_gradient_where_its_score_underflows(score_function: str, fused: bool) -> None:
    logits = torch.tensor([[-200.0, -500.0], [-30.0, -31.0], [3.0, 90.0]], requires_grad=True)
    probs, _ = topk_routing_with_score_function(logits, 1, score_function=score_function, fused=fused)
    (gradient,) = torch.autograd.grad(probs.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    expected, _ = reference.routing(exact, 1, score_function=score_function)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    assert gradient.isfinite().all()
    assert_close(gradient[1:], wanted[1:])
    assert gradient[0].abs().max() < 1e-18


@pytest.mark.parametrize(
    ("shape", "topk", "options", "message"),
    [
        ((7, 5), 0, {}, r"topk \(0\) must lie between 1 and the number of experts \(5\)"),
        ((7, 5), 6, {}, r"topk \(6\) must lie between 1 and the number of experts \(5\)"),
        ((7, 3, 5), 2, {}, r"logits \(\(7, 3, 5\)\) must have two dimensions"),
        (
            (7, 5),
            2,
            {"score_function": "tanh"},
            r"score_function \('tanh'\) must be one of 'softmax', 'sigmoid', 'sqrtsoftplus'",
        ),
        ((7, 5), 2, {"expert_bias": torch.zeros(5)}, r"expert_bias needs score_function 'sigmoid' or 'sqrtsoftplus'"),
        (
            (7, 6),
            2,
            {"num_groups": 4, "group_topk": 2},
            r"num_groups \(4\) must divide .* \(6\): one of \[1, 2, 3, 6\]",
        ),
        ((7, 6), 2, {"precomputed_indices": torch.zeros(7, 3).long()}, r"expert_ids \(\[7, 3\]\) .* = \[7, 2\]"),
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
