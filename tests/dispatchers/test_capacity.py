"""Capacity mode: equal splits, no host sync, static shapes, and sizes that all ranks agree on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import DispatcherConfig, MoECapacityTokenDispatcher
from moe import MoEConfig, MoELayer, ProcessGroups
from tests.dispatchers.test_alltoall import PROBS, ROUTING_MAP, HostCopies, weighted_copies
from tests.ranks import run_ranks

CAPACITY = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.5}


def layer_of(groups: ProcessGroups | None = None, **fields: Any) -> MoELayer:
    sizes = {"hidden_size": 12, "num_moe_experts": 8, "moe_ffn_hidden_size": 6, "moe_router_topk": 2}
    return MoELayer(MoEConfig(**(sizes | CAPACITY | fields)), groups)


def test_dispatch_by_hand() -> None:
    dispatcher = MoECapacityTokenDispatcher(DispatcherConfig(num_moe_experts=4), capacity_of=lambda tokens: tokens - 1)
    hidden = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    expert_input, plan = dispatcher.dispatch(hidden, PROBS, ROUTING_MAP)
    assert expert_input.tokens.data_ptr() == hidden.data_ptr()
    assert expert_input.row_ids.tolist() == [0, 2, 2, -1, 0, 1, -1, -1]
    assert expert_input.probs.tolist() == [0.1, 0.7, 0.8, 0, 0.3, 0.6, 0, 0]
    assert expert_input.tokens_per_expert_list == (2, 2, 2, 2)
    assert expert_input.tokens_per_expert.tolist() == [2, 2, 2, 2]
    output = dispatcher.combine(weighted_copies(expert_input), plan)
    torch.testing.assert_close(output, torch.tensor([[0.4], [1.2], [4.5]], dtype=torch.float64), rtol=1e-15, atol=0)


def test_more_tokens_than_slots_are_not_lost_in_silence() -> None:
    dispatcher = MoECapacityTokenDispatcher(DispatcherConfig(num_moe_experts=4), capacity_of=lambda tokens: 1)
    with pytest.raises(RuntimeError, match=r"An expert has more tokens than its capacity \(1\)"):
        dispatcher.dispatch(torch.zeros(3, 1), PROBS, ROUTING_MAP)


@pytest.mark.parametrize("fused", [False, True])
def test_a_layer_runs_on_the_meta_device(fused: bool) -> None:
    """Tensors without data: whatever reads one, or makes a shape depend on one, raises."""
    layer = layer_of(moe_router_fusion=fused, moe_aux_loss_coeff=0.1).to("meta")
    hidden = torch.empty(10, 2, 12, device="meta", requires_grad=True)
    output = layer(hidden)
    output.sum().backward()
    assert output.shape == hidden.grad.shape == (10, 2, 12)


def test_a_dropless_layer_needs_its_counts() -> None:
    layer = MoELayer(MoEConfig(hidden_size=12, num_moe_experts=8, moe_ffn_hidden_size=6)).to("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):  # else the test above could not fail
        layer(torch.empty(10, 2, 12, device="meta"))


def host_copies_worker(ep: int, etp: int) -> list[Any]:
    """Return the host copies of forward and backward, and the splits and expert slots of two different routings."""
    groups = ProcessGroups.build(ep, etp)
    layer = layer_of(groups, moe_expert_capacity_tokens=20, moe_router_padding_for_quantization=True)
    splits: list[Any] = []
    seen: list[Any] = []
    layer.experts.register_forward_pre_hook(
        lambda _, args: seen.append((args[0].tokens_per_expert_list, args[0].tokens.shape, args[0].row_ids.shape))
    )
    to_all = dist.all_to_all_single

    def all_to_all_single(output: Tensor, rows: Tensor, out: list[int], into: list[int], **kwargs: Any) -> Any:
        splits.append((tuple(out), tuple(into), rows.shape))
        return to_all(output, rows, out, into, **kwargs)

    calls, per_run = [], []
    for seed, num_tokens in ((dist.get_rank(), 20), (7, 3 * dist.get_rank())):
        hidden = torch.randn(num_tokens, 1, 12, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        with pytest.MonkeyPatch.context() as monkeypatch, HostCopies() as copies:
            monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
            layer(hidden).sum().backward()
        calls += copies.calls
        per_run.append((list(splits), list(seen)))
        splits.clear()
        seen.clear()
    return [calls, per_run]


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_no_host_copy_and_the_same_sizes_for_every_routing_on_every_rank(ep: int, etp: int) -> None:
    results = run_ranks(host_copies_worker, 4, ep, etp)
    assert results == [results[0]] * 4
    calls, (first, second) = results[0]
    assert calls == []
    assert first == second
    for output_splits, input_splits, _ in first[0]:
        assert len({*output_splits, *input_splits}) == 1
    assert len(first[0]) >= 6


def unequal_worker() -> tuple[str, str]:
    """Ranks with other token counts, at the first dispatch and at a later one."""
    told = []
    for counts in ((4, 6), (4, 4)):
        layer = layer_of(ProcessGroups.build(2))
        rank = dist.get_rank()
        try:
            layer(torch.randn(counts[rank], 1, 12))
            layer(torch.randn(5, 1, 12))
        except ValueError as error:
            told.append(str(error))
    return told[0], told[1]


def test_ranks_that_would_choose_other_capacities_are_told_so() -> None:
    for first, later in run_ranks(unequal_worker, 2):
        assert "the ranks must have the same number of tokens; they have [4, 6]" in first
        assert "The number of tokens (5) must stay what it was at the first dispatch (4)" in later
        assert "set moe_expert_capacity_tokens" in first
        assert "set moe_expert_capacity_tokens" in later


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"moe_dispatch_num_chunks": 2}, r"moe_dispatch_num_chunks \(2\) is not available with moe_pad_expert_input"),
        ({"moe_deterministic": True}, r"moe_deterministic \(True\) is not available with moe_pad_expert_input"),
        ({"moe_expert_capacity_tokens": 0}, r"moe_expert_capacity_tokens \(0\) must be a positive whole number"),
        (
            {
                "moe_expert_capacity_factor": None,
                "moe_pad_expert_input_to_capacity": False,
                "moe_expert_capacity_tokens": 4,
            },
            r"moe_expert_capacity_tokens \(4\) has no effect without moe_expert_capacity_factor",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layer_of(**fields)


def test_chunks_are_refused_by_the_dispatcher_too() -> None:
    dispatcher = MoECapacityTokenDispatcher(DispatcherConfig(num_moe_experts=4), capacity_of=lambda tokens: tokens)
    with pytest.raises(ValueError, match=r"num_chunks \(2\) must be 1 in capacity mode"):
        dispatcher.start_dispatch(torch.zeros(3, 1), PROBS, ROUTING_MAP, 2)
