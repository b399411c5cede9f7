"""Bytes that a rank sends in a step, by formula, and where they cross.

docs/memory.md states the formulas; the legend is that of `moe.memory`, and `n` is the size of a group. Rows are counted
to other ranks. What every rank of a group needs is counted as a ring sends it: an all_gather or reduce_scatter (n - 1)
/ n of the whole, an all_reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatchers.permutation import sum_dtype
from dispatchers.wire import WireFormat, mean_targets, wire_format
from moe.config import TransformerConfig
from moe.layout import Batch, Layout, block_kinds, expert_load, num_nodes_of_dispatch
from moe.memory import reduced_over, weights_of
from moe.saved_bytes import Recompute
from router.config import ROUTER_DTYPES

KINDS = ("dispatch", "combine", "gradients", "parameters", "tensor parallel")
RINGS = ("gradients", "parameters", "tensor parallel")


@dataclass(frozen=True)
class Traffic:
    """What one rank sends of one kind over one group in a step.

    Attributes:
        kind: one of KINDS; "parameters" are those that FSDP2 gathers.
        group: "tp", "etp", "ep", "tp_ep", "dp", "edp", "world"; "nodes" and "node" are the two levels of a
            deduplicated dispatch.
        bytes: to other ranks.
    """

    kind: str
    group: str
    bytes: float


def traffic_of(config: TransformerConfig, layout: Layout, batch: Batch, recompute: Recompute = "none") -> list[Traffic]:
    """Return what a rank sends in one step, when loads are even; counters, losses and norms are left out.

    Args:
        config: the model.
        layout: the ranks.
        batch: what a rank computes.
        recompute: as in `saved_bytes`; what is computed again communicates again.
    """
    found = [*_of_gradients(config, layout), *_of_parameters(config, layout, batch)]
    found += _of_tensor_parallel(config, layout, batch, is_repeated=recompute == "block")
    for block, is_moe, number in block_kinds(config):
        if is_moe and layout.tp_ep > 1:
            found += _of_experts(block, layout, batch, number * batch.num_microbatches, recompute != "none")
    return [traffic for traffic in found if traffic.bytes]


def reduced_bytes(config: TransformerConfig, layout: Layout) -> dict[str, int]:
    """Return by placement the bytes that `finalize_gradients` sums over ranks, as groups.counter counts them."""
    width, ranks = sum_dtype(config.params_dtype).itemsize, reduced_over(layout)
    sums = dict.fromkeys(ranks, 0)
    for weight in weights_of(config, layout):
        if ranks[weight.placement] > 1:
            sums[weight.placement] += width * weight.number * weight.num_kept(layout)
    return sums


def _of_gradients(config: TransformerConfig, layout: Layout) -> list[Traffic]:
    """Once a step: what `finalize_gradients` sums."""
    names = {"replicated": "tp" if layout.fsdp else "world", "tp": "dp", "expert": "edp"}
    ranks = reduced_over(layout)
    return [
        Traffic("gradients", names[placement], 2 * _share(ranks[placement]) * values)
        for placement, values in reduced_bytes(config, layout).items()
    ]


def _of_parameters(config: TransformerConfig, layout: Layout, batch: Batch) -> list[Traffic]:
    """Each micro-batch under FSDP2: parameters are gathered before forward and backward, gradients summed after it."""
    if not layout.fsdp:
        return []
    width, found = sum_dtype(config.params_dtype).itemsize, []
    for group, num_ranks, is_expert in (("dp", layout.dp, False), ("edp", layout.edp, True)):
        weights = [w for w in weights_of(config, layout) if (w.placement == "expert") == is_expert]
        values = num_ranks * sum(w.number * w.num_kept(layout) for w in weights)  # padded to equal shards
        sent = batch.num_microbatches * _share(num_ranks) * values
        found.append(Traffic("parameters", group, 2 * config.params_dtype.itemsize * sent))
        found.append(Traffic("gradients", group, width * sent))
    return found


def _of_tensor_parallel(config: TransformerConfig, layout: Layout, batch: Batch, *, is_repeated: bool) -> list[Traffic]:
    """Each micro-batch: the sequence is gathered and scattered around attention and vocabulary."""
    whole = batch.tokens(layout) * layout.tp
    states = _share(layout.tp) * whole * config.hidden_size * config.params_dtype.itemsize
    per_block = 6 if is_repeated else 4  # forward: gather, scatter; backward: the same
    of_loss = 2 * (layout.tp - 1) * whole * sum_dtype(config.params_dtype).itemsize
    sent = (per_block * config.num_layers + 4) * states + of_loss
    return [Traffic("tensor parallel", "tp", batch.num_microbatches * sent)]


def _share(num_ranks: int) -> float:
    """(n - 1) / n, the part of a whole that a rank sends around a ring."""
    return (num_ranks - 1) / num_ranks


@dataclass(frozen=True)
class _Hop:
    """Mean rows and (row, expert) pairs that a rank sends to the other ranks of a group in one exchange of a dispatch,
    which may be an all-gather of what an earlier one brought."""

    group: str
    rows: float
    slots: float


def _of_experts(
    config: TransformerConfig, layout: Layout, batch: Batch, times: int, is_repeated: bool
) -> list[Traffic]:
    """Return dispatch and combine of `times` layers' forwards and backwards."""
    name = "capacity" if config.has_static_shapes else config.dispatcher_name
    wire = wire_format(
        name if name in ("capacity", "alltoall", "allgather") else "deduplicated",
        config.expert_hidden_size,
        config.params_dtype.itemsize,
        config.num_moe_experts,
        layout.ep,
        num_nodes=num_nodes_of_dispatch(config, layout),
        payload=config.dispatch_payload,
        prob_bytes=ROUTER_DTYPES[config.moe_router_dtype].itemsize,
    )
    forwards = 2 if is_repeated else 1
    counts = wire.counts * (layout.tp_ep - 1) * config.moe_dispatch_num_chunks
    found = [Traffic("dispatch", "tp_ep", forwards * times * counts)]
    for hop in _hops(config, layout, batch):
        there, back = _bytes_of(hop, wire)
        found.append(Traffic("dispatch", hop.group, times * (forwards * there + back)))
        found.append(Traffic("combine", hop.group, times * (forwards + 1) * hop.rows * wire.returned))
    return found


def _bytes_of(hop: _Hop, wire: WireFormat) -> tuple[float, float]:
    """Return the bytes of an exchange of a dispatch in forward and in backward."""
    there = hop.rows * wire.row + hop.slots * wire.beside
    return there, hop.rows * wire.row_gradient + hop.slots * wire.beside_gradient


def _hops(config: TransformerConfig, layout: Layout, batch: Batch) -> list[_Hop]:
    """Return the exchanges of one dispatch; combine makes them the other way."""
    tokens, ranks, load = batch.tokens(layout), layout.tp_ep, expert_load(config, layout, batch)
    if config.dispatcher_name == "allgather":
        return [_Hop("tp_ep", tokens * (ranks - 1), tokens * (ranks - 1))]
    if config.dispatcher_name == "alltoall":
        across, around = _share(layout.ep) * load.rows_sent, (layout.etp - 1) * load.rows_sent
        return [_Hop("ep", across, across), _Hop("etp", around, around)]
    slots, nodes = tokens * config.moe_router_topk, num_nodes_of_dispatch(config, layout)
    if nodes == 1:
        return [_Hop("tp_ep", _share(ranks) * load.rows_sent, _share(ranks) * slots * layout.etp)]
    node_size = ranks // nodes
    to_nodes = mean_targets(config.num_moe_experts, config.moe_router_topk, nodes) * tokens
    inside = _share(node_size)
    return [
        _Hop("nodes", _share(nodes) * to_nodes, _share(nodes) * slots),
        _Hop("node", inside * load.rows_sent, inside * slots * layout.etp),
    ]


def share_across_nodes(traffic: Traffic, layout: Layout, gpus_per_node: int) -> float:
    """Return which part of it leaves the node, 0 to 1.

    Rows go to all other ranks of a group alike. Of a ring every g-th transfer leaves a node with g ranks of the group.
    """
    if traffic.group in ("nodes", "node"):
        return float(traffic.group == "nodes")
    stride, size = layout.group(traffic.group)
    inside = min(size, max(1, gpus_per_node // stride))
    if inside == size:
        return 0.0
    return 1 / inside if traffic.kind in RINGS else (size - inside) / (size - 1)
