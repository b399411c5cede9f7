"""The oracle against numbers worked out by hand, and its gradients against finite differences."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.tolerances import assert_close, tolerance


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LOGITS = _tensor([[0.0, math.log(3.0), math.log(2.0)], [math.log(4.0), 0.0, math.log(4.0)]])


def test_softmax_over_the_chosen() -> None:
    probs, routing_map = reference.routing(LOGITS, 2)
    assert_close(probs, _tensor([[0, 0.6, 0.4], [0.5, 0, 0.5]]), what="probs")
    assert routing_map.tolist() == [[False, True, True], [True, False, True]]


def test_softmax_before_the_choice_is_not_renormalised() -> None:
    probs, _ = reference.routing(LOGITS, 2, pre_softmax=True, scaling_factor=3.0)
    assert_close(probs, _tensor([[0, 3 / 2, 1], [4 / 3, 0, 4 / 3]]), what="probs")


def test_sigmoid_scores_are_divided_by_their_sum() -> None:
    probs, _ = reference.routing(LOGITS, 2, score_function="sigmoid")
    sigmoids = (3 / 4, 2 / 3)  # 3 / (1 + 3), 2 / (1 + 2)
    assert_close(probs, _tensor([[0, sigmoids[0] / sum(sigmoids), sigmoids[1] / sum(sigmoids)], [0.5, 0, 0.5]]))


def test_a_single_sigmoid_score_is_kept_and_the_lower_index_wins_a_tie() -> None:
    probs, _ = reference.routing(LOGITS, 1, score_function="sigmoid")
    assert_close(probs, _tensor([[0, 3 / 4, 0], [4 / 5, 0, 0]]))


def test_expert_bias_changes_the_choice_alone() -> None:
    probs, _ = reference.routing(LOGITS, 1, score_function="sigmoid", expert_bias=_tensor([0.5, 0.0, 0.0]))
    assert_close(probs, _tensor([[1 / 2, 0, 0], [4 / 5, 0, 0]]))


def test_router_adds_its_bias_to_the_product() -> None:
    hidden, weight = _tensor([[1.0, 2.0]]), _tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])  # logits 1, 2, 1
    probs, _ = reference.router(hidden, weight, 2, bias=_tensor([0.0, -9.0, math.log(3.0)]))
    assert_close(probs, _tensor([[0.25, 0, 0.75]]))


def test_aux_loss_counts_the_topk_and_averages_the_scores() -> None:
    # scores 1/6 3/6 2/6 and 4/9 1/9 4/9; the top one: experts 1 and 0
    mean = [(1 / 6 + 4 / 9) / 2, (3 / 6 + 1 / 9) / 2]
    expected = 0.1 * 3 * (0.5 * mean[0] + 0.5 * mean[1])
    assert_close(reference.aux_loss(LOGITS, 1, 0.1), _tensor(expected))


def test_aux_loss_counts_are_divided_by_topk() -> None:
    # the top two: experts 1 2 and 0 2, so counts 1 1 2 of 4 slots
    mean = [(1 / 6 + 4 / 9) / 2, (3 / 6 + 1 / 9) / 2, (2 / 6 + 4 / 9) / 2]
    expected = 0.1 * 3 * (mean[0] / 4 + mean[1] / 4 + mean[2] / 2)
    assert_close(reference.aux_loss(LOGITS, 2, 0.1), _tensor(expected))


def test_aux_loss_is_exact_where_the_counts_are_thirds() -> None:
    # scores 1/2 1/2, 1/4 3/4, 1/4 3/4; the top one (the lower index of a tie): experts 0 1 1
    logits = _tensor([[0.0, 0.0], [0.0, math.log(3.0)], [0.0, math.log(3.0)]])
    assert_close(reference.aux_loss(logits, 1, 0.1), _tensor(0.1 * 2 * (1 / 3 * 1 / 3 + 2 / 3 * 2 / 3)))


def test_aux_loss_of_a_balanced_router_is_its_coefficient() -> None:
    assert_close(reference.aux_loss(torch.eye(4, dtype=torch.float64), 1, 0.3), _tensor(0.3))
    assert_close(reference.aux_loss(torch.eye(4, dtype=torch.float64), 1, 0.3, "sigmoid"), _tensor(0.3))


def test_aux_loss_of_sigmoids_normalises_over_all_experts() -> None:
    # sigmoids 1/2 3/4 2/3, sum 23/12
    assert_close(reference.aux_loss(LOGITS[:1], 1, 1.0, "sigmoid"), _tensor(3 * (3 / 4) / (23 / 12)))


def test_z_loss_is_the_mean_squared_logsumexp() -> None:
    assert_close(reference.z_loss(LOGITS, 0.5), _tensor(0.5 * (math.log(6.0) ** 2 + math.log(9.0) ** 2) / 2))


@pytest.mark.parametrize(
    ("name", "options", "fc1", "expected"),
    [
        ("silu", {}, [[math.log(3.0)]], math.log(3.0) * 3 / 4),
        ("silu", {}, [[math.log(3.0)], [2.0]], math.log(3.0) * 3 / 4 * 2),
        ("gelu", {}, [[1.0]], 0.8413447460685429),  # Phi(1)
        ("gelu", {}, [[-1.0], [10.0]], -1.5865525393145705),  # 10 * -Phi(-1)
        ("squared_relu", {}, [[3.0]], 9.0),
        ("squared_relu", {}, [[-3.0]], 0.0),
        ("quick_gelu", {}, [[2.0]], 2.0 / (1 + math.exp(-3.404))),
        ("quick_gelu", {"clamp": 7.0, "offset": 1.0}, [[9.0], [-9.0]], -42.0 / (1 + math.exp(-7 * 1.702))),
        ("quick_gelu", {"clamp": 7.0, "offset": 1.0}, [[-9.0], [9.0]], -72.0 / (1 + math.exp(9 * 1.702))),
        ("quick_gelu", {"alpha": 1.0}, [[math.log(3.0)], [2.0]], math.log(3.0) * 3 / 4 * 2),
    ],
)
def test_activation(name: str, options: dict[str, float], fc1: list[list[float]], expected: float) -> None:
    assert_close(reference.activation(name, _tensor(fc1), **options), _tensor([expected]), what=name)


def test_a_clamp_needs_a_gated_unit() -> None:
    with pytest.raises(ValueError, match=r"clamp \(7\.0\).*gated"):
        reference.activation("gelu", _tensor([[1.0]]), clamp=7.0)


def test_experts_weight_the_output_and_its_bias() -> None:
    hidden = _tensor([[1.0, 2.0], [3.0, 4.0]])
    probs, routing_map = _tensor([[0.5, 0.25], [0, 2.0]]), torch.tensor([[True, True], [False, True]])
    fc1 = _tensor([[[[1.0, 1.0]]], [[[0.0, 1.0]]]])  # [E, 1, 1, H]: expert 0 sums, expert 1 takes the second
    fc2 = _tensor([[[1.0], [-1.0]], [[10.0], [0.0]]])  # [E, H, 1]
    output = reference.experts(
        hidden,
        probs,
        routing_map,
        fc1,
        fc2,
        partial(reference.activation, "squared_relu"),
        fc1_bias=_tensor([[[-1.0]], [[0.0]]]),
        fc2_bias=_tensor([[0.0, 100.0], [1.0, 0.0]]),
    )
    # token 0: 0.5 (2^2 [1, -1] + [0, 100]) + 0.25 (2^2 [10, 0] + [1, 0]); token 1: 2 (4^2 [10, 0] + [1, 0])
    assert_close(output, _tensor([[2 + 10.25, 48.0], [322.0, 0.0]]), what="output")


def test_shared_expert_is_gated_by_the_token() -> None:
    hidden = _tensor([[math.log(3.0), 2.0]])
    fc1, fc2 = _tensor([[[0.0, 1.0]]]), _tensor([[1.0], [0.5]])
    act = partial(reference.activation, "squared_relu")
    assert_close(reference.shared_expert(hidden, fc1, fc2, act), _tensor([[4.0, 2.0]]))
    gated = reference.shared_expert(hidden, fc1, fc2, act, gate=_tensor([[1.0, 0.0]]))
    assert_close(gated, _tensor([[3.0, 1.5]]))


def test_layer_is_router_plus_experts_plus_shared_expert() -> None:
    weights = reference.random_weights(3, 5, 4, seed=1, biases=True, shared_ffn_size=6)
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    act = partial(reference.activation, "silu")
    output = reference.moe_layer(hidden, weights, 2, act, score_function="sigmoid", scaling_factor=2.5)

    expected = []
    for x in hidden:
        scores = torch.sigmoid(weights.router @ x + weights.router_bias)
        top = torch.topk(scores, 2)
        y = torch.zeros(5, dtype=torch.float64)
        for p, e in zip(top.values / top.values.sum() * 2.5, top.indices, strict=True):
            gate, up = weights.fc1[e] @ x + weights.fc1_bias[e]
            y = y + p * (weights.fc2[e] @ (torch.nn.functional.silu(gate) * up) + weights.fc2_bias[e])
        gate, up = weights.shared_fc1 @ x
        shared = weights.shared_fc2 @ (torch.nn.functional.silu(gate) * up)
        expected.append(y + shared * torch.sigmoid(weights.shared_gate @ x))
    assert_close(output, torch.stack(expected), what="output")


@pytest.mark.parametrize("options", [{}, {"pre_softmax": True}, {"score_function": "sigmoid"}], ids=str)
def test_gradients_match_finite_differences(options: dict[str, object]) -> None:
    weights = reference.random_weights(3, 2, 2, seed=3, biases=True, shared_ffn_size=2)
    hidden = torch.randn(4, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
    names = list(weights.tensors())

    def outputs(hidden: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = reference.MoEWeights(**dict(zip(names, tensors, strict=True)))
        act = partial(reference.activation, "quick_gelu", clamp=7.0, offset=1.0)
        logits = hidden @ given.router.T
        score_function = options.get("score_function", "softmax")
        return (
            reference.moe_layer(hidden, given, 2, act, **options),
            reference.aux_loss(logits, 2, 0.1, score_function),
            reference.z_loss(logits, 0.1),
        )

    assert torch.autograd.gradcheck(outputs, (hidden, *weights.tensors().values()))


def test_no_tokens_give_zero_gradients() -> None:
    weights = reference.random_weights(3, 5, 4, seed=5, gate_rows=1, biases=True, shared_ffn_size=6)
    hidden = torch.empty(0, 5, dtype=torch.float64, requires_grad=True)
    output = reference.moe_layer(hidden, weights, 2, partial(reference.activation, "gelu"))
    logits = hidden @ weights.router.T
    loss = output.sum() + reference.aux_loss(logits, 2, 1.0) + reference.z_loss(logits, 1.0)
    gradients = torch.autograd.grad(loss, [hidden, *weights.tensors().values()])
    assert output.shape == (0, 5)
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients)


def test_assert_close_names_the_worst_element() -> None:
    expected = _tensor([[1.0, 2.0], [3.0, 4.0]])
    actual = expected.clone()
    actual[1, 0] += 2**-20
    actual[0, 1] += 2**-21
    with pytest.raises(AssertionError, match=r"dX: at \(1, 0\) actual 3\.00000095.*expected 3; .*2 of 4 elements"):
        assert_close(actual, expected, what="dX")
    assert_close(actual, expected, torch.float32, "dX")


def test_assert_close_is_relative_to_the_scale_of_the_tensor() -> None:
    expected = _tensor([1e6, 0.0])
    assert_close(_tensor([1e6, 0.9e-4]), expected)
    with pytest.raises(AssertionError, match="max"):
        assert_close(_tensor([1e6, 1.1e-4]), expected)
    with pytest.raises(AssertionError, match="max"):
        assert_close(_tensor([0.0, 1e-300]), _tensor([0.0, 0.0]))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_assert_close_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(AssertionError, match=r"y: the actual value at \(1,\) is (nan|inf)"):
        assert_close(_tensor([1.0, value]), _tensor([1.0, value]), what="y")


def test_assert_close_refuses_another_shape_and_other_integers() -> None:
    with pytest.raises(AssertionError, match=r"y: shape \(2, 1\), expected \(2,\)"):
        assert_close(_tensor([[1.0], [1.0]]), _tensor([1.0, 1.0]), what="y")
    with pytest.raises(AssertionError, match="at"):
        assert_close(torch.tensor([10**6]), torch.tensor([10**6 + 1]))


def test_every_float_dtype_under_test_has_a_tolerance() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        tolerance(torch.float8_e4m3fn)
    assert tolerance(torch.bool) == 0
