"""Balancing losses against the oracle, in value and gradient, and how they join the main loss."""

import pytest
import torch
from torch import Tensor

from router import attach_loss, compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func, z_loss_func
from router.losses import Sequences, on_backward
from tests import reference
from tests.tolerances import assert_close

NUM_EXPERTS = 5


def _aux_loss(logits: Tensor, topk: int, coeff: float, score_function: str, *, fused: bool = False) -> Tensor:
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, score_function, fused)
    return switch_load_balancing_loss_func(scores, routing_map.sum(0), len(logits), topk, NUM_EXPERTS, coeff, fused)


def _with_gradient(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return loss, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_losses_equal_the_reference(
    score_function: str, fused: bool, topk: int, num_tokens: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(num_tokens, NUM_EXPERTS, dtype=dtype).mul(2).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, score_function, fused)
    expected_scores = reference.scores_of(exact, score_function)
    assert_close(scores, expected_scores / expected_scores.sum(-1, keepdim=True), what="scores")
    assert torch.equal(routing_map, reference.largest(exact, topk))
    for loss, expected in (
        (
            _aux_loss(logits, topk, 0.3, score_function, fused=fused),
            reference.aux_loss(exact, topk, 0.3, score_function),
        ),
        (z_loss_func(logits, 0.3), reference.z_loss(exact, 0.3)),
    ):
        assert loss.dtype == dtype
        value, gradient = _with_gradient(loss, logits)
        expected_value, expected_gradient = _with_gradient(expected, exact)
        assert_close(value, expected_value, what="loss")
        assert_close(gradient, expected_gradient, what="gradient")


def test_hand_written_losses() -> None:
    scores, counts = torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]), torch.tensor([2, 1, 1])
    mean_scores, shares = torch.tensor([0.625, 0.1875, 0.1875]), torch.tensor([1 / 2, 1 / 4, 1 / 4])
    loss = switch_load_balancing_loss_func(scores, counts, 2, 2, 3, 0.1)
    assert_close(loss, 0.1 * 3 * (mean_scores * shares).sum())
    logits = torch.tensor([[1.0, 3.0], [0.25, 0.75]]).log()  # logsumexp log 4 and 0
    assert_close(z_loss_func(logits, 0.1), 0.1 * torch.tensor(4.0).log().square() / 2)


@pytest.mark.parametrize("topk", [1, 2])
def test_a_balanced_router_gives_exactly_the_coefficient(topk: int) -> None:
    logits = torch.stack([torch.arange(8.0).roll(shift) for shift in range(8)])
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, topk, "softmax")
    assert routing_map.sum(0).tolist() == [topk] * 8
    loss = switch_load_balancing_loss_func(scores.double(), routing_map.sum(0), 8, topk, 8, 0.25)
    assert_close(loss, torch.tensor(0.25), torch.float32)
    uniform = switch_load_balancing_loss_func(torch.full((8, 8), 1 / 8), routing_map.sum(0), 8, topk, 8, 0.25)
    assert uniform.item() == 0.25


def test_shares_of_uneven_parts_add_up_to_the_loss() -> None:
    logits = torch.randn(13, NUM_EXPERTS, dtype=torch.float64)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, "softmax")
    counts, total, parts = routing_map.sum(0), torch.tensor(13), [0, 5, 1, 7]
    aux_shares = [
        switch_load_balancing_loss_func(part, counts, total, 2, NUM_EXPERTS, 0.3) for part in scores.split(parts)
    ]
    z_shares = [z_loss_func(part, 0.3, total_num_tokens=total) for part in logits.split(parts)]
    assert_close(torch.stack(aux_shares).sum(), reference.aux_loss(logits, 2, 0.3))
    assert_close(torch.stack(z_shares).sum(), reference.z_loss(logits, 0.3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_attach_loss_adds_a_gradient_and_changes_no_value(dtype: torch.dtype) -> None:
    logits = torch.randn(7, NUM_EXPERTS, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(7, NUM_EXPERTS)
    loss = logits.to(dtype).square().sum()
    attached = attach_loss(logits, loss, scale=0.25)
    assert torch.equal(attached, logits)
    assert attached.data_ptr() == logits.data_ptr()
    (gradient,) = torch.autograd.grad((attached * weight).sum(), logits, retain_graph=True)
    assert_close(gradient, weight + 0.25 * 2 * logits)
    (halved,) = torch.autograd.grad((attached * weight).sum() * 0.0, logits)
    assert_close(halved, 0.5 * logits)  # the strength does not depend on the main loss


@pytest.mark.parametrize(
    ("shape", "topk", "score_function", "message"),
    [
        ((7, 5), 2, "tanh", r"score_function \('tanh'\) must be one of 'softmax', 'sigmoid', 'sqrtsoftplus'"),
        ((7, 5), 6, "softmax", r"topk \(6\) must lie between 1 and the experts of logits \[T, E\] \(\[7, 5\]\)"),
        ((7, 3, 5), 2, "softmax", r"topk \(2\) must lie .* \(\[7, 3, 5\]\)"),
    ],
)
def test_refused_arguments(shape: tuple[int, ...], topk: int, score_function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_routing_scores_for_aux_loss(torch.randn(shape), topk, score_function)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_padding_rows_count_nowhere(score_function: str, fused: bool) -> None:
    logits = torch.randn(13, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    padding = torch.rand(13, generator=torch.Generator().manual_seed(2)) < 0.4
    valid = logits[~padding]
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, 2, score_function, fused, padding)
    assert not routing_map[padding].any()
    assert not scores[padding].any()
    counts, num_valid = routing_map.sum(0), int((~padding).sum())
    loss = switch_load_balancing_loss_func(scores, counts, num_valid, 2, NUM_EXPERTS, 0.3)
    masked = compute_routing_scores_for_aux_loss(logits, 2, score_function)[1]
    by_mask = switch_load_balancing_loss_func(masked, counts, num_valid, 2, NUM_EXPERTS, 0.3, padding_mask=padding)
    expected = _with_gradient(reference.aux_loss(valid, 2, 0.3, score_function), logits)
    for value in (loss, by_mask):
        for actual, wanted in zip(_with_gradient(value, logits), expected, strict=True):
            assert_close(actual, wanted)
    for actual, wanted in zip(
        _with_gradient(z_loss_func(logits, 0.3, padding), logits),
        _with_gradient(reference.z_loss(logits[~padding], 0.3), logits),
        strict=True,
    ):
        assert_close(actual, wanted)
    everything = torch.ones(13, dtype=torch.bool)
    assert z_loss_func(logits, 0.3, everything).item() == 0.0


def test_fused_loss_scores_save_scores_and_logits() -> None:
    for score_function, num_saved in (("softmax", 1), ("sigmoid", 2), ("sqrtsoftplus", 2)):
        sizes = []
        for fused in (False, True):
            logits, saved = torch.randn(13, NUM_EXPERTS, requires_grad=True), {}
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x, saved=saved: (saved.update({x.data_ptr(): x}), x)[1], lambda x: x
            ):
                compute_routing_scores_for_aux_loss(logits, 2, score_function, fused)
            sizes.append(len(saved))
        assert sizes[1] == num_saved
        assert sizes[1] < sizes[0] or score_function == "softmax"


def test_sequences_add_up_their_own_tokens() -> None:
    values = torch.arange(12.0).view(6, 2)
    assert Sequences.of(torch.Size((3, 2, 9)), None).sum(values).tolist() == [[12.0, 15.0], [18.0, 21.0]]
    assert Sequences.of(torch.Size((6, 9)), None).sum(values).tolist() == [[30.0, 36.0]]
    packed = Sequences.of(torch.Size((6, 1, 9)), torch.tensor([0, 1, 1, 4], dtype=torch.int32))
    assert packed.sum(values).tolist() == [[0.0, 1.0], [0.0, 0.0], [12.0, 15.0]]  # the last two tokens belong to none
    for shape, offsets, message in (
        ((3, 2, 9), torch.tensor([0, 3]), r"the batch of \[3, 2, 9\] is 2; use 1"),
        ((6, 1, 9), torch.tensor([0.0, 6.0]), r"cu_seqlens \(\[2\], torch.float32\) must be"),
        ((6, 1, 9), [0, 6], r"cu_seqlens \(list\) must be a tensor"),
        ((6, 1, 9), torch.tensor([2, 6]), r"cu_seqlens \(\[2, 6\]\) must ascend from 0 to at most the 6 tokens"),
        ((6, 1, 9), torch.tensor([0, 4, 3, 6]), r"must ascend from 0"),
        ((6, 1, 9), torch.tensor([0, 7]), r"cu_seqlens \(\[0, 7\]\) must ascend from 0 to at most the 6 tokens"),
        ((6, 1, 9), torch.tensor([0]), r"cu_seqlens \(\[1\], torch.int64\) must be \[sequences \+ 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Sequences.of(torch.Size(shape), offsets)


def test_an_action_on_backward_runs_once_or_at_once() -> None:
    seen: list[str] = []
    attached = on_backward(torch.ones(3, requires_grad=True), lambda: seen.append("backward"))
    assert seen == []
    for _ in range(2):
        attached.sum().backward(retain_graph=True)
    assert seen == ["backward"]
    on_backward(torch.ones(3), lambda: seen.append("at once"))
    assert seen == ["backward", "at once"]


def test_the_scale_of_an_attached_loss_is_read_in_backward() -> None:
    logits, scale = torch.ones(3, requires_grad=True), torch.ones(())
    attached = attach_loss(logits, (logits * 2).sum(), scale)
    scale.fill_(4.0)
    (gradient,) = torch.autograd.grad((attached * 0.0).sum(), logits)
    assert gradient.tolist() == [8.0] * 3
