"""The contract between dispatcher and experts, and what every dispatcher checks at construction."""

from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import DispatcherConfig, ExpertInput, LocalTokens, ReceivedRows, TokenDispatcher
from dispatchers.collectives import group_of_one


@dataclass(frozen=True)
class Groups:
    """Groups without a backend: sizes and ranks alone."""

    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup


def fake_groups(ep_size: int) -> Groups:
    ep = dist.ProcessGroup(0, ep_size)
    return Groups(ep, group_of_one(), ep)


class LoggingDispatcher(TokenDispatcher[str]):
    """Notes the order of its stages in the plan and hands rows on."""

    def dispatch_preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> LocalTokens:
        return LocalTokens(hidden_states + 1, probs, routing_map, routing_map.sum(0), tuple(hidden_states.shape))

    def token_dispatch(self, local: LocalTokens) -> tuple[ReceivedRows, str]:
        row_ids = torch.arange(2)
        return ReceivedRows(local.tokens * 2, local.probs[:, 0], row_ids, local.tokens_per_expert, (2,)), "plan"

    def dispatch_postprocess(self, received: ReceivedRows) -> ExpertInput:
        counts = received.tokens_per_expert
        return ExpertInput(received.rows + 3, received.row_ids, received.probs, counts, (2,))

    def combine_preprocess(self, expert_output: Tensor, plan: str) -> Tensor:
        return expert_output + len(plan)

    def token_combine(self, rows: Tensor, plan: str) -> Tensor:
        return rows * 10

    def combine_postprocess(self, rows: Tensor, plan: str) -> Tensor:
        return rows - 5


def test_dispatch_and_combine_run_the_stages_in_order() -> None:
    dispatcher = LoggingDispatcher(DispatcherConfig(num_moe_experts=1))
    expert_input, plan = dispatcher.dispatch(torch.tensor([[1.0], [2.0]]), torch.ones(2, 1), torch.ones(2, 1).bool())
    assert expert_input.tokens.tolist() == [[(1 + 1) * 2 + 3], [(2 + 1) * 2 + 3]]
    assert plan == "plan"
    assert dispatcher.combine(torch.tensor([[1.0]]), plan).tolist() == [[(1 + 4) * 10 - 5]]


def test_a_dispatcher_without_its_stages_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TokenDispatcher(DispatcherConfig(num_moe_experts=1))  # type: ignore[abstract]


def test_without_groups_all_experts_are_local() -> None:
    dispatcher = LoggingDispatcher(DispatcherConfig(num_moe_experts=6))
    assert dispatcher.num_local_experts == 6
    for group in (dispatcher.ep_group, dispatcher.etp_group, dispatcher.tp_ep_group):
        assert (group.size(), group.rank()) == (1, 0)
    assert dispatcher.pad_multiple == 1
    assert not dispatcher.check_collectives
    assert list(dispatcher.parameters()) == []


def test_experts_are_shared_out_over_the_expert_parallel_group() -> None:
    config = DispatcherConfig(num_moe_experts=6, moe_check_collectives=True)
    dispatcher = LoggingDispatcher(config, fake_groups(3), pad_multiple=16)
    assert (dispatcher.num_local_experts, dispatcher.pad_multiple, dispatcher.check_collectives) == (2, 16, True)


@pytest.mark.parametrize(("num_experts", "ep_size", "nearest"), [(6, 4, r"\[4, 8\]"), (2, 3, r"\[3\]")])
def test_experts_must_divide_by_the_expert_parallel_size(num_experts: int, ep_size: int, nearest: str) -> None:
    text = rf"num_moe_experts \({num_experts}\) must be divisible by the expert-parallel size \({ep_size}\).*{nearest}"
    with pytest.raises(ValueError, match=text):
        LoggingDispatcher(DispatcherConfig(num_moe_experts=num_experts), fake_groups(ep_size))


def test_pad_multiple_is_at_least_one() -> None:
    with pytest.raises(ValueError, match=r"pad_multiple \(0\) must be at least 1"):
        LoggingDispatcher(DispatcherConfig(num_moe_experts=1), pad_multiple=0)


@pytest.mark.parametrize(("num_slots", "num_probs"), [(2, 3), (3, 2), (4, 4)])
def test_counts_must_sum_to_the_slots(num_slots: int, num_probs: int) -> None:
    row_ids, probs = torch.zeros(num_slots, dtype=torch.int64), torch.zeros(num_probs)
    with pytest.raises(ValueError, match=rf"sums to 3 slots, but row_ids has {num_slots} and probs {num_probs}"):
        ExpertInput(torch.zeros(1, 1), row_ids, probs, torch.tensor([1, 2]), (1, 2))


def test_what_passes_between_the_stages_is_immutable() -> None:
    row_ids, counts = torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2])
    expert_input = ExpertInput(torch.zeros(1, 1), row_ids, torch.zeros(3), counts, (1, 2))
    with pytest.raises(FrozenInstanceError):
        expert_input.tokens = row_ids  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_moe_experts": 0}, r"num_moe_experts \(0\) must be"),
        ({"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}, r"moe_token_dispatcher_type \('flex'\) must be"),
    ],
)
def test_config_refuses(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DispatcherConfig(**fields)  # type: ignore[arg-type]
