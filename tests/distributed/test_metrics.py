"""collect_metrics over factorings of 1, 2 and 4 ranks against counts by plain loops over all ranks' tokens.

Every rank rebuilds the tokens of all ranks and the decision for each, then counts on Python numbers what should arrive.
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe import MoEConfig, MoELayer, ProcessGroups, collect_metrics
from moe.metrics import BYTES, MoEMetrics
from tests import reference
from tests.distributed.test_layer import failures_of
from tests.ranks import run_ranks

HIDDEN, FFN, TOPK, DEAD = 12, 20, 2, 2
FACTORINGS = {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(2, 1), (4, 1), (2, 2)]}  # ranks -> (ep, etp)
TOKENS = ((16, 0, 48, 32), (5, 19, 9, 16))  # of each rank in each of two micro-batches
EXPERTS = {"first": 8, "second": 4}  # layer -> E
LAYERS = {f"{name}.router": num_experts for name, num_experts in EXPERTS.items()}
PADDED = {"moe_router_padding_for_quantization": True}  # to 16
LIMITED = {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": PADDED,
    "padded, in chunks": {**PADDED, "moe_dispatch_num_chunks": 3},
    "padded, recomputed": {**PADDED, "moe_layer_recompute": True},
    "limited": LIMITED,
    "limited and padded": {**PADDED, **LIMITED},
    "to capacity": {**LIMITED, "moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_tokens": 48},
    "deterministic": {"moe_deterministic": True},  # to 32
}
CASES = [("alltoall", mode) for mode in MODES]
CASES += [(kind, mode) for kind in ("allgather", "deduplicated") for mode in ("padded", "limited and padded")]
CASES += [("allgather", "to capacity"), ("deduplicated", "padded, in chunks")]


def tokens_of(rank: int, batch: int) -> Tensor:
    """[T, H]; feature 0 is what no token may have to like expert DEAD."""
    hidden = torch.randn(
        TOKENS[batch][rank], HIDDEN, generator=torch.Generator().manual_seed(9 * batch + rank)
    ).double()
    hidden[:, 0] = 1.0
    return hidden


def build(mode: str, dispatcher: str, groups: ProcessGroups | None, name: str) -> MoELayer:
    torch.manual_seed(3)
    sizes = {"hidden_size": HIDDEN, "num_moe_experts": EXPERTS[name], "moe_ffn_hidden_size": FFN}
    exact = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", "init_method_std": 0.5}
    losses = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
    options = {"moe_router_topk": TOPK, "moe_token_dispatcher_type": dispatcher, **MODES[mode]}
    layer = MoELayer(MoEConfig(**sizes, **exact, **losses, **options), groups)
    with torch.no_grad():
        layer.router.weight[DEAD, 0] = -50.0
    return layer


def up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def limited(column: list[bool], capacity: int) -> list[bool]:
    """Keep the first ones of a column."""
    return [chosen and sum(column[:token]) < capacity for token, chosen in enumerate(column)]


def filled(column: list[bool], count: int) -> list[bool]:
    """Add the first free tokens to a column until it has `count`."""
    missing = max(0, count - sum(column))
    return [chosen or column[:token].count(False) < missing for token, chosen in enumerate(column)]


def parts_of(column: list[bool], num_parts: int) -> list[list[bool]]:
    """Cut a column in parts of nearly equal size, the longer ones first."""
    sizes = [len(column) // num_parts + (part < len(column) % num_parts) for part in range(num_parts)]
    return [column[sum(sizes[:part]) : sum(sizes[: part + 1])] for part in range(num_parts)]


def slots_of_batch(maps: list[list[list[bool]]], mode: str, dispatcher: str, group_size: int) -> int:
    """Return the slots that all experts compute, from the columns [ranks][E][T] of what the routers kept."""
    num_experts, options = len(maps[0]), MODES[mode]
    capacity = math.ceil(48 * TOPK / num_experts * 0.7)
    if mode == "to capacity" and dispatcher == "alltoall":
        return len(maps) * num_experts * capacity
    if mode == "to capacity":
        return sum(min(capacity, len(column)) for columns in maps for column in columns)
    multiple = {"deterministic": 32}.get(mode, 16 if "padded" in mode else 1)
    if "padded" in mode:
        maps = [[filled(c, up(sum(c), 16)) if len(c) % 16 == 0 else c for c in columns] for columns in maps]
    num_parts, total = options.get("moe_dispatch_num_chunks", 1), 0
    for first in range(0, len(maps), group_size):  # ranks that exchange tokens
        for expert in range(num_experts):
            for part in range(num_parts):
                held = [sum(parts_of(columns[expert], num_parts)[part]) for columns in maps[first : first + group_size]]
                total += up(sum(held), multiple)
    return total


@cache
def decision(name: str, rank: int, batch: int) -> tuple[list[list[bool]], float, float]:
    """Return the columns [E][T] of a router's choice, and its two losses."""
    logits = tokens_of(rank, batch) @ build("plain", "alltoall", None, name).router.weight.detach().T
    columns = [list(map(bool, column)) for column in reference.largest(logits, TOPK).T.tolist()]
    if not logits.shape[0]:
        return columns, 0.0, 0.0
    return columns, reference.aux_loss(logits, TOPK, 1.0).item(), reference.z_loss(logits, 1.0).item()


@cache
def expected_of(mode: str, dispatcher: str, name: str, group_size: int, ranks: tuple[int, ...]) -> dict[str, Any]:
    """Return the figures of a layer that these ranks hold, counted by hand."""
    num_experts = EXPERTS[name]
    load, dropped, computed, aux, z = [0] * num_experts, [0] * num_experts, 0, 0.0, 0.0
    for batch in range(2):
        kept_maps = []
        for rank in ranks:
            chosen, aux_loss, z_loss = decision(name, rank, batch)
            kept = chosen
            if "moe_expert_capacity_factor" in MODES[mode]:
                num_tokens = 48 if mode == "to capacity" else TOKENS[batch][rank]
                kept = [limited(column, math.ceil(num_tokens * TOPK / num_experts * 0.7)) for column in chosen]
            load = [sum(column) + before for column, before in zip(chosen, load, strict=True)]
            lost = [sum(column) - sum(left) for column, left in zip(chosen, kept, strict=True)]
            dropped = [one + before for one, before in zip(lost, dropped, strict=True)]
            kept_maps.append(kept)
            if batch == 1:
                aux, z = aux + aux_loss / len(ranks), z + z_loss / len(ranks)
        computed += slots_of_batch(kept_maps, mode, dispatcher, group_size)
    shares = [count / sum(load) for count in load if count]
    entropy = -sum(share * math.log(share) for share in shares)
    return {
        "tokens_per_expert": load,
        "dropped_tokens_per_expert": dropped,
        "load_imbalance": max(load) * num_experts / sum(load),
        "load_entropy": entropy,
        "normalized_load_entropy": entropy / math.log(num_experts),
        "dead_experts": [expert for expert, count in enumerate(load) if not count],
        "num_dead_experts": load.count(0),
        "drop_rate": sum(dropped) / sum(load),
        "computed_slots": computed,
        "pad_share": 1 - (sum(load) - sum(dropped)) / computed,
        "aux_loss": aux,
        "z_loss": z,
    }


def differences(found: dict[str, Any], index: int, expected: dict[str, Any], what: str) -> list[str]:
    faults = []
    for name, value in expected.items():
        actual = found[name][index]
        close = actual == pytest.approx(value, rel=2e-7, abs=1e-12)  # losses are kept in fp32
        if not close:
            faults.append(f"{what}, {name}: {actual}, expected {value}")
    return faults


def train(model: nn.ModuleDict, rank: int) -> None:
    for batch in range(2):
        for layer in model.values():
            hidden = tokens_of(rank, batch).unsqueeze(1).requires_grad_()
            layer(hidden).sum().backward()


def figures_worker(cases: list[tuple[str, str]]) -> list[str]:
    faults, world_size = [], dist.get_world_size()
    for ep, etp in FACTORINGS[world_size]:
        groups = ProcessGroups.build(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
        for dispatcher, mode in cases:
            model = nn.ModuleDict({name: build(mode, dispatcher, groups, name) for name in EXPERTS})
            train(model, dist.get_rank())
            before = groups.counter.total("all_reduce").calls
            found = collect_metrics(model, groups).to_dict()
            assert groups.counter.total("all_reduce").calls - before == (world_size > 1)
            assert found["layer_names"] == list(LAYERS)
            for index, name in enumerate(EXPERTS):
                expected = expected_of(mode, dispatcher, name, ep * etp, tuple(range(world_size)))
                faults += differences(found, index, expected, f"ep {ep}, etp {etp}, {dispatcher}, {mode}, {name}")
            again = collect_metrics(model, groups)
            if any(getattr(again, name).any() for name in ("tokens_per_expert", "computed_slots", "routed_slots")):
                faults.append(f"ep {ep}, etp {etp}, {dispatcher}, {mode}: counters did not start again")
    return faults


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_figures_are_those_counted_by_hand(world_size: int) -> None:
    assert failures_of(run_ranks(figures_worker, world_size, CASES)) == ""


def test_the_cases_have_padding_and_drops_where_they_say() -> None:
    for dispatcher, mode in CASES:
        figures = expected_of(mode, dispatcher, "first", 2, (0, 1))
        assert (figures["drop_rate"] > 0.05) == ("limited" in mode), mode
        assert DEAD in figures["dead_experts"]
        assert (figures["pad_share"] > 0.05) == (mode not in ("plain", "limited")), mode


def stages_worker() -> list[str]:
    """Ranks 0 and 3 hold the first layer, rank 2 the second, rank 1 none: as stages of a pipeline, layers alone."""
    rank, groups = dist.get_rank(), ProcessGroups.build()
    names = {0: ["first"], 1: [], 2: ["second"], 3: ["first"]}[rank]
    model = nn.ModuleDict({name: build("padded", "alltoall", None, name) for name in names})
    train(model, {0: 0, 2: 2, 3: 1}.get(rank, 0))
    found = collect_metrics(model, groups, LAYERS).to_dict()
    first = expected_of("padded", "alltoall", "first", 1, (0, 1))
    second = expected_of("padded", "alltoall", "second", 1, (2,))
    faults = differences(found, 0, first, "first") + differences(found, 1, second, "second")
    return faults


def test_ranks_may_hold_any_part_of_the_layers() -> None:
    assert failures_of(run_ranks(stages_worker, 4)) == ""


def empty_worker() -> MoEMetrics:
    return collect_metrics(nn.Linear(2, 3), ProcessGroups.build())


def test_no_layer_anywhere_is_no_row() -> None:
    for metrics in run_ranks(empty_worker, 2):
        assert metrics.as_scalars() == dict.fromkeys(BYTES, 0.0)


def bytes_worker() -> tuple[dict[str, int], dict[str, int]]:
    groups = ProcessGroups.build(expert_model_parallel_size=2)
    train(nn.ModuleDict({name: build("plain", "alltoall", groups, name) for name in EXPERTS}), dist.get_rank())
    own = dict.fromkeys(BYTES, 0)
    for (operation, _), traffic in groups.counter.records.items():
        for kind in ("dispatch", "combine", "all_reduce"):
            own[f"{kind}_bytes"] += traffic.bytes if kind in operation else 0
        own["communication_bytes"] += traffic.bytes
    found = collect_metrics(nn.Identity(), groups).to_dict()
    return own, {name: found[name] for name in BYTES}


def test_bytes_by_kind_are_summed_over_ranks() -> None:
    (first, found), (second, same) = run_ranks(bytes_worker, 2)
    assert found == same == {name: first[name] + second[name] for name in BYTES}
    assert found["dispatch_bytes"] > 0
    assert found["combine_bytes"] > 0
