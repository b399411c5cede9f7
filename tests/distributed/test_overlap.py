"""Tokens travel while something else is computed: what starts before what, in forward and in backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import RankGroup, start_all_to_all_rows
from moe import MoEConfig, MoELayer, ProcessGroups
from tests.ranks import run_ranks


class Logged:
    """A work handle that notes when it is waited for."""

    def __init__(self, work: Any, log: list[str], name: str) -> None:
        self.work, self.log, self.name = work, log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.work.wait()


def log_transfers(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """Note start and wait of every exchange of rows of width 6, numbered in the order of their starts."""
    to_all = dist.all_to_all_single
    started = 0

    def all_to_all_single(output: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal started
        work = to_all(output, rows, *args, **kwargs)
        if rows.shape[1:] != (6,):
            return work
        assert kwargs["async_op"]
        name, started = f"rows {started}", started + 1
        log.append(f"start {name}")
        return Logged(work, log, name)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


def note(log: list[str], name: str) -> Any:
    """Return a forward hook that notes the forward of a module and the beginning of its backward."""
    count = 0

    def hook(module: Any, args: Any, output: Tensor) -> None:
        nonlocal count
        label, count = f"{name} {count}", count + 1
        log.append(label)
        output.register_hook(lambda grad: log.append(f"{label} backward"))

    return hook


def order_worker(num_chunks: int, overlap: bool, dispatcher: str) -> list[str]:
    config = MoEConfig(
        hidden_size=6,
        num_moe_experts=4,
        moe_ffn_hidden_size=5,
        moe_shared_expert_intermediate_size=3,
        moe_shared_expert_overlap=overlap,
        moe_dispatch_num_chunks=num_chunks,
        moe_token_dispatcher_type=dispatcher,
    )
    layer, log = MoELayer(config, ProcessGroups.build(2)), []
    layer.experts.register_forward_hook(note(log, "experts"))
    layer.shared_experts.register_forward_hook(note(log, "shared"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        log_transfers(monkeypatch, log)
        layer(torch.randn(5, 1, 6, requires_grad=True)).sum().backward()
    return log


@pytest.mark.parametrize("dispatcher", ["alltoall", "deduplicated", "allgather"])
def test_the_shared_expert_runs_while_tokens_travel(dispatcher: str) -> None:
    for log in run_ranks(order_worker, 2, 1, True, dispatcher):
        assert log == [
            "start rows 0",  # dispatch
            "shared 0",
            "wait rows 0",
            "experts 0",
            "start rows 1",  # combine
            "wait rows 1",
            "start rows 2",  # gradient of combine
            "wait rows 2",
            "experts 0 backward",
            "start rows 3",  # gradient of dispatch
            "shared 0 backward",
            "wait rows 3",
        ]


def test_without_overlap_the_shared_expert_runs_after_the_combine() -> None:
    for log in run_ranks(order_worker, 2, 1, False, "alltoall"):
        assert log.index("shared 0") > log.index("wait rows 1")


@pytest.mark.parametrize("dispatcher", ["alltoall", "deduplicated", "allgather"])
def test_the_next_chunk_travels_while_experts_compute_one(dispatcher: str) -> None:
    for log in run_ranks(order_worker, 2, 3, False, dispatcher):
        place = {entry: index for index, entry in enumerate(log)}
        for chunk in range(3):
            if chunk < 2:
                assert place[f"start rows {chunk + 1}"] < place[f"experts {chunk}"] < place[f"wait rows {chunk + 1}"]
        # combine: 3 4 5 start after their experts, and are waited for when the last chunk is computed
        assert place["start rows 3"] < place["experts 1"] < place["wait rows 3"]
        assert place["start rows 4"] < place["experts 2"] < place["wait rows 4"]
        # backward: 6 7 8 are the gradients of combine, of the last chunk first; 9 10 11 those of dispatch
        assert place["start rows 7"] < place["experts 2 backward"] < place["wait rows 7"]
        assert place["start rows 8"] < place["experts 1 backward"] < place["wait rows 8"]
        assert place["start rows 9"] < place["experts 1 backward"] < place["wait rows 9"]
        assert place["start rows 10"] < place["experts 0 backward"] < place["wait rows 10"]


def misuse_worker() -> tuple[str, bool]:
    group = RankGroup(dist.group.WORLD)
    rows = torch.ones(2, 3, requires_grad=True)
    moving = start_all_to_all_rows(rows, [1, 1], [1, 1], group=group, what="letters")
    total = moving.wait().sum()
    told = ""
    try:
        moving.wait()
    except RuntimeError as error:
        told = str(error)
    total.backward(retain_graph=True)
    first = rows.grad.clone()
    total.backward()  # twice over one graph
    return told, torch.equal(rows.grad, 2 * first)


def test_a_transfer_is_waited_for_once_and_differentiated_as_often_as_wanted() -> None:
    for told, is_right in run_ranks(misuse_worker, 2):
        assert told == "all_to_all letters: wait() was called twice, or without a start."
        assert is_right
