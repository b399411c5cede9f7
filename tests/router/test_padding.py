"""Padding of the routing map: the right slots, on new storage, without a trace in outputs and gradients."""

import pytest
import torch
from torch import Tensor

from router import RoutingMapPadding, pad_routing_map, topk_routing_with_score_function
from tests.tolerances import assert_close

NUM_TOKENS, NUM_EXPERTS, IDLE = 64, 5, 3
MODES = [("softmax", False), ("softmax", True), ("sigmoid", False)]  # score function, softmax before the choice


def _logits() -> Tensor:
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, dtype=torch.float64)
    logits[:, IDLE] = -30.0
    return logits


def _first_free(routing_map: Tensor, pad_multiple: int) -> Tensor:
    columns = []
    for column in routing_map.t().tolist():
        free = [token for token, routed in enumerate(column) if not routed]
        for token in free[: -sum(column) % pad_multiple]:
            column[token] = True
        columns.append(column)
    return torch.tensor(columns).t()


def test_hand_written_map() -> None:
    columns = [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0]]
    padded = [[1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]
    assert pad_routing_map(torch.tensor(columns).t().bool(), 4).t().int().tolist() == padded


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("pad_multiple", [1, 4, 16, 32])
def test_every_used_expert_reaches_the_multiple_on_new_storage(pad_multiple: int, layout: str, fused: bool) -> None:
    _, router_map = topk_routing_with_score_function(_logits(), 2, fused=fused)
    stored = router_map if layout == "rows" else router_map.t().contiguous()
    routing_map = stored if layout == "rows" else stored.t()
    values, version, address = stored.clone(), stored._version, stored.data_ptr()

    padded = pad_routing_map(routing_map, pad_multiple)

    assert torch.equal(stored, values)
    assert (stored._version, stored.data_ptr()) == (version, address)
    assert padded.untyped_storage().data_ptr() != address
    assert padded.is_contiguous()
    counts = padded.sum(0)
    assert counts[IDLE] == 0
    assert (counts % pad_multiple == 0).all()
    assert (counts - routing_map.sum(0) < pad_multiple).all()
    assert torch.equal(padded, _first_free(routing_map, pad_multiple))
    assert torch.equal(RoutingMapPadding(pad_multiple)(routing_map), padded)


def _outputs_and_gradients(mode: tuple[str, bool], pad_multiple: int, *, fused: bool) -> list[Tensor]:
    """Route, pad, and let y_t = sum_e p_te W_e x_t over the map that dispatch would get."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    upstream = torch.randn(NUM_TOKENS, 4, dtype=torch.float64, generator=generator)
    logits = _logits().requires_grad_()
    probs, routing_map = topk_routing_with_score_function(logits, 2, mode[1], score_function=mode[0], fused=fused)
    dispatched = RoutingMapPadding(pad_multiple)(routing_map)
    assert int(dispatched.sum() - routing_map.sum()) > 0 or pad_multiple == 1
    output = torch.zeros(NUM_TOKENS, 4, dtype=torch.float64)
    for expert in range(NUM_EXPERTS):
        tokens = dispatched[:, expert].nonzero().flatten()
        expert_output = probs[tokens, expert].unsqueeze(-1) * (hidden[tokens] @ weight[expert].t())
        output = output.index_add(0, tokens, expert_output)
    return [output, *torch.autograd.grad((output * upstream).sum(), (logits, hidden, weight))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pad_multiple", [4, 16, 32])
@pytest.mark.parametrize("mode", MODES)
def test_backward_works_after_padding_and_changes_nothing(
    mode: tuple[str, bool], pad_multiple: int, fused: bool
) -> None:
    torch.manual_seed(0)
    expected = _outputs_and_gradients(mode, 1, fused=False)
    torch.manual_seed(0)
    actual = _outputs_and_gradients(mode, pad_multiple, fused=fused)
    for name, left, right in zip(("output", "logits", "hidden", "weight"), actual, expected, strict=True):
        assert_close(left, right, what=name)


def test_too_few_free_tokens_raise_with_the_numbers() -> None:
    routing_map = torch.zeros(100, 3, dtype=torch.bool)
    routing_map[:90, 1] = True
    with pytest.raises(
        ValueError, match=r"pad_multiple \(128\): expert 1 has 90 of 100 tokens and needs 38 more, but only 10 are free"
    ):
        pad_routing_map(routing_map, 128)
    assert RoutingMapPadding(128)(routing_map) is routing_map
    assert pad_routing_map(routing_map, 95)[:, 1].sum() == 95


@pytest.mark.parametrize("shape", [(0, 5), (32, 5)])
def test_aligned_token_counts_need_no_host_sync(shape: tuple[int, int]) -> None:
    routing_map = torch.empty(shape, dtype=torch.bool, device="meta")
    assert RoutingMapPadding(16)(routing_map).shape == shape
    assert RoutingMapPadding(16)(torch.empty(33, 5, dtype=torch.bool, device="meta")).shape == (33, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):  # so the meta device does see a sync
        pad_routing_map(torch.empty(33, 5, dtype=torch.bool, device="meta"), 16)


def test_refused_arguments() -> None:
    routing_map = torch.zeros(8, 3, dtype=torch.bool)
    for pad in (lambda multiple: pad_routing_map(routing_map, multiple), RoutingMapPadding):
        with pytest.raises(ValueError, match=r"pad_multiple \(0\) must be at least 1"):
            pad(0)
    with pytest.raises(ValueError, match=r"routing_map \(torch.int64\) must be torch.bool"):
        pad_routing_map(routing_map.long(), 4)
