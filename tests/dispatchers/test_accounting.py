"""What the counter says against what torch.distributed was given."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import CommunicationCounter, RankGroup, all_to_all_rows
from dispatchers.fp8_rows import packed_width
from moe import MoEConfig, MoEGPT, MoELayer, ProcessGroups, TransformerConfig, clip_grad_norm, finalize_gradients
from moe.metrics import collect_metrics
from tests.ranks import run_ranks


def test_counts_by_hand() -> None:
    counter = CommunicationCounter()
    counter.add_rows("all_to_all dispatch rows", "ep", 1, [2, 5, 0], row_bytes=8)
    counter.add_rows("all_to_all dispatch rows", "ep", 1, [0, 1, 3], row_bytes=8)
    counter.add_rows("all_to_all combine rows", "etp", 0, [1, 1], row_bytes=2)
    counter.add_reduced("all_reduce", "tp_cp", 100)
    traffic = counter.records["all_to_all dispatch rows", "ep"]
    assert (traffic.calls, traffic.rows, traffic.bytes, traffic.own_rows, traffic.own_bytes) == (2, 5, 40, 6, 48)
    assert traffic.bytes_to == [16, 48, 24]
    assert counter.total().bytes == 40 + 2 + 100
    assert counter.total("rows").calls == 3
    assert counter.total("rows", "etp").bytes == 2
    assert counter.total("nothing").calls == 0
    assert (
        "all_to_all combine rows                  etp               1            1                2" in counter.table()
    )
    assert copy.deepcopy(counter) is counter
    counter.reset()
    assert counter.records == {}


def seen_by_backend(monkeypatch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    """Count bytes for other ranks at torch.distributed itself."""
    to_all, gather, reduce = dist.all_to_all_single, dist.all_gather, dist.all_reduce

    def all_to_all_single(output: Tensor, rows: Tensor, out: list[int], into: list[int], group: Any, **kw: Any) -> Any:
        row_bytes = rows.itemsize * rows.shape[1:].numel()
        seen["all_to_all"] += (sum(into) - into[group.rank()]) * row_bytes
        return to_all(output, rows, out, into, group=group, **kw)

    def all_gather(outputs: list[Tensor], values: Tensor, group: Any) -> Any:
        seen["all_gather"] += values.nbytes * (group.size() - 1)
        return gather(outputs, values, group=group)

    def all_reduce(values: Tensor, *args: Any, **kw: Any) -> Any:
        seen["all_reduce"] += values.nbytes
        return reduce(values, *args, **kw)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)


WAYS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "chunks": {"moe_dispatch_num_chunks": 2, "moe_dispatch_dtype": "fp8"},
    "allgather": {"moe_token_dispatcher_type": "allgather", "moe_dispatch_dtype": "fp8"},
    "deduplicated": {"moe_token_dispatcher_type": "deduplicated"},
    "nodes": {
        "moe_token_dispatcher_type": "deduplicated",
        "moe_dispatch_node_size": 2,
        "moe_dispatch_dtype": "fp8",
        "moe_dispatch_grad_dtype": "fp8",
    },
    "capacity, fp8": {
        "moe_pad_expert_input_to_capacity": True,
        "moe_expert_capacity_factor": 1.0,
        "moe_dispatch_dtype": "fp8",
    },
    "capacity": {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing"},
}


def counted_worker(ep: int, etp: int) -> list[str]:
    groups, found = ProcessGroups.build(ep, etp, tensor_model_parallel_size=2), []
    for name, fields in WAYS.items():
        groups.counter.reset()
        seen: Counter[str] = Counter()
        losses = {} if name == "quantiles" else {"moe_aux_loss_coeff": 0.1}
        config = MoEConfig(
            hidden_size=140, num_moe_experts=8, moe_ffn_hidden_size=6, moe_router_topk=3, **losses, **fields
        )
        layer = MoELayer(config, groups)
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen_by_backend(monkeypatch, seen)
            layer(torch.randn(12, 1, 140, requires_grad=True)).square().sum().backward()
            finalize_gradients(layer, groups)
            clip_grad_norm(layer, 1.0, groups)
        counted: Counter[str] = Counter()
        for (operation, group), traffic in groups.counter.records.items():
            wire = (
                "all_to_all"
                if operation.startswith(("all_gather dispatch", "reduce_scatter"))
                else operation.split()[0]
            )
            counted[wire] += traffic.bytes
            if group == "group":
                found.append(f"{name}: {operation} has no name for its group")
        if counted != seen:
            found.append(f"{name}: counted {counted}, sent {seen}")
        for (operation, _), traffic in groups.counter.records.items():
            if "dispatch rows" in operation and traffic.rows:
                packs = fields.get("moe_dispatch_grad_dtype" if "backward" in operation else "moe_dispatch_dtype")
                width = packed_width(140) if packs else 4 * 140
                if traffic.bytes != traffic.rows * width:
                    found.append(f"{name}: {operation} sends {traffic.bytes / traffic.rows} bytes a row, not {width}")
    return found


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_the_counter_knows_every_byte(ep: int, etp: int) -> None:
    assert run_ranks(counted_worker, 4, ep, etp) == [[]] * 4


def distinct_worker(node_size: int | None) -> list[tuple[int, int]]:
    """Return (rows counted, distinct pairs of token and rank or node) for dispatch and combine, both ways."""
    groups, rank = ProcessGroups.build(4), dist.get_rank()
    config = MoEConfig(
        hidden_size=4,
        num_moe_experts=16,
        moe_ffn_hidden_size=3,
        moe_router_topk=6,
        moe_token_dispatcher_type="deduplicated",
        moe_dispatch_node_size=node_size,
    )
    layer = MoELayer(config, groups)
    hidden = torch.randn(11 + rank, 1, 4, requires_grad=True)
    routing_map = layer.router(hidden)[1]
    layer(hidden).sum().backward()
    to_ranks = routing_map.view(-1, 4, 4).any(-1)  # [T, ranks]
    expected = int(to_ranks.sum())
    if node_size is not None:  # once to each node, and from there, for the rows of both nodes, to its ranks
        maps: list[Any] = [None] * 4
        dist.all_gather_object(maps, to_ranks)
        node = rank // node_size
        same_place = [peer for peer in range(4) if peer % node_size == rank % node_size]
        passed_on = sum(int(maps[peer][:, node * node_size : (node + 1) * node_size].sum()) for peer in same_place)
        expected = int(routing_map.view(-1, 2, 8).any(-1).sum()) + passed_on
    records = groups.counter.records
    received = [records[f"all_to_all {way} rows", "tp_ep"] for way in ("dispatch", "combine")]
    mirrored = [records[f"all_to_all {way} rows backward", "tp_ep"] for way in ("combine", "dispatch")]
    sent = [t.rows + t.own_rows for t in (received[0], mirrored[0])]  # the gradient of combine goes where dispatch goes
    back = [t.rows + t.own_rows for t in (received[1], mirrored[1])]
    total = [0] * 4
    dist.all_gather_object(total, (back, expected))
    assert sum(b[0] for b, _ in total) == sum(b[1] for b, _ in total) == sum(e for _, e in total)
    return [(rows, expected) for rows in sent]


@pytest.mark.parametrize("node_size", [None, 2])
def test_deduplicated_sends_each_token_once_to_each_rank(node_size: int | None) -> None:
    for pairs in run_ranks(distinct_worker, 4, node_size):
        for rows, expected in pairs:
            assert rows == expected
            assert rows > 0


def metrics_worker() -> tuple[int, int, int, int]:
    """Ranks with different numbers of tokens: the metrics hold the bytes of all of them."""
    groups = ProcessGroups.build(2)
    config = TransformerConfig(
        hidden_size=8, num_moe_experts=4, moe_ffn_hidden_size=6, num_layers=2, num_attention_heads=2, vocab_size=11
    )
    model = MoEGPT(config, groups)
    model(torch.zeros(2, 3 + dist.get_rank(), dtype=torch.int64)).sum().backward()
    own = groups.counter.total("dispatch").bytes
    metrics = collect_metrics(model, groups)
    return own, metrics.dispatch_bytes, metrics.combine_bytes, metrics.communication_bytes


def test_metrics_hold_the_bytes_of_all_ranks() -> None:
    results = run_ranks(metrics_worker, 2)
    assert results[0][1:] == results[1][1:]
    own, (_, dispatch, combine, everything) = sum(result[0] for result in results), results[0]
    assert dispatch == own
    assert 0 < combine < dispatch + combine < everything


def one_worker() -> dict[tuple[str, str], Any]:
    counter = CommunicationCounter()
    group = RankGroup(dist.group.WORLD, "world", counter=counter)
    rows = torch.zeros(3, 5, dtype=torch.bfloat16, requires_grad=True)
    splits = [1, 2] if dist.get_rank() == 0 else [2, 1]
    all_to_all_rows(rows, splits, splits, group=group, what="letters").sum().backward()
    return {key: (t.calls, t.rows, t.bytes, t.bytes_to) for key, t in counter.records.items()}


def test_a_wrapper_counts_into_what_its_caller_passes() -> None:
    first, second = run_ranks(one_worker, 2)
    assert first == {
        ("all_to_all letters", "world"): (1, 2, 20, [10, 20]),
        ("all_to_all letters backward", "world"): (1, 2, 20, [10, 20]),
    }
    assert second["all_to_all letters", "world"] == (1, 2, 20, [20, 10])
