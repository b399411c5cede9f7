"""Traffic formulas beside what ranks really send: groups.counter, and a wiretap on torch's own collectives."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dispatchers.wire import mean_targets, wire_format
from moe import MoEGPT, ProcessGroups, TransformerConfig, apply_fsdp, finalize_gradients
from moe.layout import Batch, Layout
from moe.traffic import Traffic, reduced_bytes, share_across_nodes, traffic_of
from tests.moe.test_memory import Recomputed
from tests.ranks import run_ranks

BASE = TransformerConfig(
    hidden_size=48,
    num_moe_experts=8,
    moe_ffn_hidden_size=40,
    moe_router_topk=2,
    num_layers=3,
    num_attention_heads=6,
    vocab_size=72,
    moe_layer_freq=(0, 1, 1),
    params_dtype=torch.bfloat16,
    sequence_parallel=True,
    moe_router_force_load_balancing="balanced",
)
BATCH = Batch(seq_length=32, micro_batch_size=2, num_microbatches=2)
DEDUPLICATED = {"moe_token_dispatcher_type": "deduplicated", "moe_router_force_load_balancing": "random"}


class Wiretap(TorchDispatchMode):
    """Adds up what torch's all_gathers and reduce_scatters send around a ring, by (operation, number of ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective and run it."""
        result, name = func(*args, **(kwargs or {})), str(func)
        if name.startswith("_c10d_functional.all_gather_into_tensor."):
            self.sent["gather", args[1]] += args[0].nbytes * (args[1] - 1)
        elif name.startswith("_c10d_functional.reduce_scatter_tensor."):
            self.sent["scatter", args[2]] += args[0].nbytes * (args[2] - 1) // args[2]
        elif name.startswith("c10d._allgather_base_."):
            num_ranks = args[0].nbytes // args[1].nbytes
            self.sent["gather", num_ranks] += args[1].nbytes * (num_ranks - 1)
        elif name.startswith("c10d._reduce_scatter_base_."):
            num_ranks = args[1].nbytes // args[0].nbytes
            self.sent["scatter", num_ranks] += args[0].nbytes * (num_ranks - 1)
        return result


def _train_on_a_rank(config: TransformerConfig, layout: Layout, mode: str) -> dict[str, Any]:
    """Run one step, and return what groups.counter and the wiretap saw of it."""
    groups = ProcessGroups.build(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(3 + dist.get_rank() // layout.tp)
    model = MoEGPT(replace(config, moe_layer_recompute=mode == "layer"), groups)
    if mode == "block":
        model.layers = nn.ModuleList(Recomputed(block) for block in model.layers)
    if layout.fsdp:
        apply_fsdp(model, groups)
    groups.counter.reset()
    with Wiretap() as tap:
        for _ in range(BATCH.num_microbatches):
            tokens = torch.randint(config.vocab_size, (BATCH.micro_batch_size, BATCH.seq_length))
            model(tokens, tokens).backward()
    finalize_gradients(model, groups, BATCH.num_microbatches)
    count = groups.counter
    reduced = {group: count.total("gradients", group).bytes for group in ("tp_dp_cp", "dp_cp", "tp", "edp")}
    return {
        "dispatch": count.total("dispatch").bytes + count.total("counts").bytes,
        "combine": count.total("combine").bytes,
        "cross-entropy": count.total("cross-entropy").bytes,
        "reduced": {group: num_bytes for group, num_bytes in reduced.items() if num_bytes},
        "tapped": tap.sent,
    }


def sums(traffic: list[Traffic]) -> dict[str, float]:
    """Return the bytes by kind."""
    found: dict[str, float] = {}
    for part in traffic:
        found[part.kind] = found.get(part.kind, 0.0) + part.bytes
    return found


@pytest.mark.parametrize(
    ("layout", "overrides", "mode", "tolerance"),
    [
        (Layout(world_size=2, ep=2), {}, "none", 0.0),
        (Layout(world_size=2, ep=2), {"moe_dispatch_dtype": "fp8", "moe_dispatch_num_chunks": 2}, "none", 0.0),
        (Layout(world_size=2, ep=2), {"moe_latent_size": 16, "add_bias_linear": True}, "layer", 0.0),
        (Layout(world_size=4, ep=2, etp=2), {}, "none", 0.0),
        (Layout(world_size=4, ep=2, tp=2), {}, "block", 0.0),
        (Layout(world_size=4, ep=4), {"moe_token_dispatcher_type": "allgather"}, "none", 0.0),
        (Layout(world_size=4, ep=4), {**DEDUPLICATED, "moe_router_topk": 3}, "none", 0.1),
        (Layout(world_size=4, ep=2, etp=2), DEDUPLICATED, "layer", 0.1),
        (Layout(world_size=4, ep=4), {**DEDUPLICATED, "moe_dispatch_node_size": 2}, "none", 0.1),
        (
            Layout(world_size=2, ep=2),
            {
                "moe_expert_capacity_factor": 1.5,
                "moe_pad_expert_input_to_capacity": True,
                "moe_expert_capacity_tokens": 64,
            },
            "none",
            0.0,
        ),
    ],
    ids=[
        "ep2",
        "fp8 chunks",
        "latent, layer",
        "ep2 etp2",
        "ep2 tp2, block",
        "allgather",
        "dedup",
        "dedup etp, layer",
        "nodes",
        "capacity",
    ],
)
def test_a_step_sends_what_the_formulas_say(
    layout: Layout, overrides: dict[str, Any], mode: Any, tolerance: float
) -> None:
    config = replace(BASE, **overrides)
    by_rank = run_ranks(_train_on_a_rank, layout.world_size, config, layout, mode)
    formula = sums(traffic_of(config, layout, BATCH, mode))
    for kind in ("dispatch", "combine"):
        mean = sum(found[kind] for found in by_rank) / layout.world_size
        assert formula[kind] == pytest.approx(mean, rel=tolerance or 1e-9), kind
    names = {"replicated": "tp_dp_cp", "tp": "dp_cp" if layout.tp > 1 else "tp_dp_cp", "expert": "edp"}
    reduced: Counter[str] = Counter()
    for placement, num_bytes in reduced_bytes(config, layout).items():
        reduced[names[placement]] += num_bytes
    assert dict(+reduced) == by_rank[0]["reduced"]


@pytest.mark.parametrize("mode", ["none", "block"])
def test_tensor_parallelism_gathers_and_scatters_the_sequence(mode: Any) -> None:
    layout = Layout(world_size=2, tp=2)
    found = run_ranks(_train_on_a_rank, 2, BASE, layout, mode)[0]
    formula = sums(traffic_of(BASE, layout, BATCH, mode))["tensor parallel"]
    assert formula == sum(found["tapped"].values()) + found["cross-entropy"]


@pytest.mark.parametrize(
    "layout",
    [Layout(world_size=2, fsdp=True), Layout(world_size=4, ep=2, fsdp=True)],
    ids=["dp2", "dp4 ep2 edp2"],
)
def test_fsdp_gathers_parameters_twice_and_scatters_gradients(layout: Layout) -> None:
    found = run_ranks(_train_on_a_rank, layout.world_size, BASE, layout, "none")[0]["tapped"]
    formula = traffic_of(BASE, layout, BATCH)
    gathered = sum(part.bytes for part in formula if part.kind == "parameters")
    scattered = sum(part.bytes for part in formula if part.kind == "gradients")
    assert gathered == pytest.approx(sum(size for (kind, _), size in found.items() if kind == "gather"), rel=0.01)
    assert scattered == pytest.approx(sum(size for (kind, _), size in found.items() if kind == "scatter"), rel=0.01)


def test_the_mean_number_of_targets() -> None:
    assert mean_targets(8, 1, 4) == pytest.approx(1)
    assert mean_targets(8, 8, 4) == 4
    # Two of four experts, two blocks: of 6 pairs 2 lie in one block.
    assert mean_targets(4, 2, 2) == pytest.approx((4 * 2 + 2 * 1) / 6)
    draws = torch.rand(20000, 64, generator=torch.Generator().manual_seed(0)).topk(6).indices // 8
    reached = torch.zeros(20000, 8).scatter_(1, draws, 1).sum(1).mean().item()
    assert mean_targets(64, 6, 8) == pytest.approx(reached, rel=0.01)


def test_an_unknown_dispatcher_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name \('pigeon'\) must be 'alltoall'"):
        wire_format("pigeon", 8, 2, 4, 2)


@pytest.mark.parametrize(
    ("traffic", "share"),
    [
        (Traffic("dispatch", "ep", 1.0), 24 / 31),  # 32 ranks of distance 1: 7 of 31 others are here
        (Traffic("combine", "etp", 1.0), 0.0),
        (Traffic("gradients", "world", 1.0), 1 / 8),
        (Traffic("gradients", "edp", 1.0), 1.0),  # distance 32
        (Traffic("gradients", "dp", 1.0), 1 / 2),  # distance 4: two of a node
        (Traffic("tensor parallel", "tp", 1.0), 0.0),
        (Traffic("dispatch", "nodes", 1.0), 1.0),
        (Traffic("dispatch", "node", 1.0), 0.0),
    ],
)
def test_what_crosses_nodes(traffic: Traffic, share: float) -> None:
    layout = Layout(world_size=64, tp=4, ep=32)
    assert share_across_nodes(traffic, layout, gpus_per_node=8) == pytest.approx(share)
