"""The contract between dispatcher and experts, and what every dispatcher checks at construction."""

from dataclasses import FrozenInstanceError, dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import (
    CommunicationCounter,
    Counts,
    DispatcherConfig,
    ExpertInput,
    InTransit,
    LocalTokens,
    RowsInFlight,
    SumInFlight,
    TokenDispatcher,
)
from dispatchers.collectives import group_of_one


@dataclass(frozen=True)
class Groups:
    """Groups without a backend: sizes and ranks alone."""

    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    tp_ep: dist.ProcessGroup
    counter: CommunicationCounter = field(default_factory=CommunicationCounter)


def fake_groups(ep_size: int) -> Groups:
    ep = dist.ProcessGroup(0, ep_size)
    return Groups(ep, group_of_one(), ep)


class LoggingDispatcher(TokenDispatcher[str]):
    """Notes the order of its stages in the plan and hands rows on."""

    def token_dispatch(self, local: LocalTokens, counts: Counts) -> tuple[InTransit, str]:
        return InTransit(RowsInFlight(local.tokens * 2), RowsInFlight(local.probs[:, 0])), str(counts.host.tolist())

    def dispatch_postprocess(self, in_transit: InTransit, plan: str) -> tuple[ExpertInput, str]:
        rows, probs = in_transit.rows.wait(), in_transit.probs.wait()
        count = rows.shape[0]
        return ExpertInput(rows + 3, torch.arange(count), probs, torch.tensor([count]), (count,)), f"plan {plan}"

    def combine_preprocess(self, expert_output: Tensor, plan: str) -> Tensor:
        return expert_output + len(plan)

    def token_combine(self, rows: Tensor, plan: str) -> RowsInFlight:
        return RowsInFlight(rows * 10)

    def combine_postprocess(self, returning: RowsInFlight | SumInFlight, plan: str) -> Tensor:
        return returning.wait() - 5


def test_dispatch_and_combine_run_the_stages_in_order() -> None:
    dispatcher = LoggingDispatcher(DispatcherConfig(num_moe_experts=1))
    expert_input, plan = dispatcher.dispatch(torch.tensor([[1.0], [2.0]]), torch.ones(2, 1), torch.ones(2, 1).bool())
    assert expert_input.tokens.tolist() == [[1 * 2 + 3], [2 * 2 + 3]]
    assert plan == "plan [[2]]"
    assert dispatcher.combine(torch.tensor([[1.0]]), plan).tolist() == [[(1 + len(plan)) * 10 - 5]]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 9])
def test_chunks_are_consecutive_tokens_with_their_counts(num_tokens: int) -> None:
    dispatcher = LoggingDispatcher(DispatcherConfig(num_moe_experts=1))
    tokens = torch.arange(float(num_tokens)).view(-1, 1)
    routing_map = torch.arange(num_tokens).view(-1, 1) % 2 == 0
    chunks = dispatcher.start_dispatch(tokens, routing_map.float(), routing_map, 3)
    received = [dispatcher.dispatch_postprocess(*chunk)[0].tokens for chunk in chunks]
    sizes = [len(rows) for rows in received]
    assert len(chunks) == 3
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat(received), tokens * 2 + 3)
    parts = routing_map.split(sizes)
    assert [plan for _, plan in chunks] == [f"[[{int(part.sum())}]]" for part in parts]


def test_a_dispatcher_without_its_stages_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TokenDispatcher(DispatcherConfig(num_moe_experts=1))  # type: ignore[abstract]


def test_without_groups_all_experts_are_local() -> None:
    dispatcher = LoggingDispatcher(DispatcherConfig(num_moe_experts=6))
    assert dispatcher.num_local_experts == 6
    for group in (dispatcher.ep_group, dispatcher.etp_group, dispatcher.tp_ep_group):
        assert (group.size, group.rank, group.check) == (1, 0, False)
    assert dispatcher.pad_multiple == 1
    assert list(dispatcher.parameters()) == []


def test_experts_are_shared_out_over_the_expert_parallel_group() -> None:
    config = DispatcherConfig(num_moe_experts=6, moe_check_collectives=True)
    groups = fake_groups(3)
    dispatcher = LoggingDispatcher(config, groups, pad_multiple=16)
    assert (dispatcher.num_local_experts, dispatcher.pad_multiple) == (2, 16)
    for name in ("ep", "tp_ep", "etp"):
        group = getattr(dispatcher, f"{name}_group")
        assert (group.group, group.name, group.check) == (getattr(groups, name), name, True)
        assert group.counter is groups.counter


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
        ({"num_moe_experts": True}, r"num_moe_experts \(True\) must be"),
        ({"moe_token_dispatcher_type": "deepep"}, r"moe_token_dispatcher_type \('deepep'\) must be one of 'allgather'"),
        ({"moe_flex_dispatcher_backend": "nccl"}, r"moe_flex_dispatcher_backend \('nccl'\) must be one of"),
        ({"moe_flex_dispatcher_backend": "deepep"}, r"belongs to moe_token_dispatcher_type 'flex', not 'alltoall'"),
        ({"moe_dispatch_dtype": "bf16"}, r"moe_dispatch_dtype \('bf16'\) must be one of None, 'fp8'"),
        ({"moe_dispatch_grad_dtype": "fp8"}, r"moe_dispatch_grad_dtype \('fp8'\) needs moe_dispatch_dtype \(None\)"),
        ({"moe_dispatch_num_chunks": 0}, r"moe_dispatch_num_chunks \(0\) must be a positive whole number"),
        ({"moe_dispatch_num_chunks": 1.5}, r"moe_dispatch_num_chunks \(1.5\) must be"),
        ({"moe_dispatch_node_size": 0}, r"moe_dispatch_node_size \(0\) must be"),
        ({"moe_dispatch_node_size": 8}, r"moe_dispatch_node_size \(8\) belongs to .* 'deduplicated', not 'alltoall'"),
        ({"moe_deterministic": "yes"}, r"moe_deterministic \('yes'\) must be True or False"),
        ({"moe_check_collectives": 1}, r"moe_check_collectives \(1\) must be True or False"),
        (
            {"moe_deterministic": True, "moe_token_dispatcher_type": "flex"},
            r"moe_deterministic \(True\) needs .* 'alltoall', not 'deduplicated'",
        ),
        ({"moe_deterministic": True, "moe_dispatch_dtype": "fp8"}, "contradict each other"),
        (
            {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": "hybridep",
                "moe_dispatch_dtype": "fp8",
            },
            r"moe_dispatch_dtype \('fp8'\) is not available with moe_flex_dispatcher_backend 'hybridep'",
        ),
    ],
)
def test_config_refuses(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DispatcherConfig(**({"num_moe_experts": 4} | fields))  # type: ignore[arg-type]


def test_flex_stands_for_its_backend() -> None:
    config = DispatcherConfig(num_moe_experts=4, moe_token_dispatcher_type="flex", moe_dispatch_node_size=2)
    assert config.dispatcher_name == "deduplicated"


@pytest.mark.parametrize(
    ("fields", "payload"),
    [
        ({}, "plain"),
        ({"moe_dispatch_dtype": "fp8"}, "fp8"),
        ({"moe_dispatch_dtype": "fp8", "moe_dispatch_grad_dtype": "fp8"}, "fp8 both ways"),
    ],
)
def test_payload_of_dispatched_rows(fields: dict[str, object], payload: str) -> None:
    config = DispatcherConfig(num_moe_experts=4, **fields)  # type: ignore[arg-type]
    assert LoggingDispatcher(config).payload == payload
