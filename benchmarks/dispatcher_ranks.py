"""Dispatchers on real ranks: what each hands to torch.distributed in every stage, held against CommunicationCounter."""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import (
    CommunicationCounter,
    DispatcherConfig,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEDeduplicatedTokenDispatcher,
    gather_rows,
    sum_rows,
)
from moe.parallel import ProcessGroups

DISPATCHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "alltoall": (MoEAlltoAllTokenDispatcher, {}),
    "deduplicated": (MoEDeduplicatedTokenDispatcher, {}),
    "deduplicated fp8": (MoEDeduplicatedTokenDispatcher, {"moe_dispatch_dtype": "fp8"}),
    "allgather": (MoEAllGatherTokenDispatcher, {}),
}
PEERS = {
    "megatron-core alltoall": "MoEAlltoAllTokenDispatcher",
    "megatron-core allgather": "MoEAllGatherTokenDispatcher",
}
STAGES = ("dispatch", "combine", "combine backward", "dispatch backward")
COUNTED = ("all_to_all_single", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
REFUSED = [
    "all_to_all",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
]
Line = dict[str, list[int]]  # rows, row_bytes, metadata_bytes that a rank has for each rank
Way = tuple[Callable[..., tuple[Tensor, Any]], Callable[..., Tensor]]  # dispatch and combine


@dataclass(frozen=True, kw_only=True)
class Case:
    """One routing of one size.

    Attributes:
        hidden_size: H.
        topk: K.
        maps: by rank [T, E] bool, True where routed.

    Raises:
        ValueError: H <= E, so that rows could not be told from metadata by their width.
    """

    hidden_size: int
    topk: int
    maps: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.hidden_size <= self.num_experts:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be more than the experts ({self.num_experts}).")

    @property
    def num_experts(self) -> int:
        """E."""
        return self.maps[0].shape[1]


@dataclass(frozen=True)
class Call:
    """What one call handed to torch.distributed: rows of shape and row_bytes, so many for each rank of the group."""

    shape: tuple[int, ...]
    row_bytes: int
    rows_to: tuple[int, ...]


def _sent(name: str, arguments: dict[str, Any]) -> Call:
    """Read a call's arguments; as a side effect turn splits into the lists that torch.distributed documents."""
    num_ranks = dist.get_world_size(arguments.get("group"))
    for key in ("input_split_sizes", "output_split_sizes"):
        if arguments.get(key) is not None:
            arguments[key] = [int(size) for size in arguments[key]]
    tensor: Tensor = arguments[{"all_gather": "tensor", "all_gather_into_tensor": "input_tensor"}.get(name, "input")]
    if name.startswith("all_gather"):
        rows_to = [tensor.shape[0]] * num_ranks
    else:
        rows_to = arguments.get("input_split_sizes") or [tensor.shape[0] // num_ranks] * num_ranks
    return Call(tuple(tensor.shape[1:]), tensor.itemsize * tensor.shape[1:].numel(), tuple(rows_to))


@contextlib.contextmanager
def wiretap() -> Iterator[list[Call]]:
    """Note every collective while the block runs; one that is not known here raises RuntimeError."""
    calls: list[Call] = []

    def noting(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)
        parameters = inspect.signature(function)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            arguments = parameters.bind(*args, **kwargs).arguments
            calls.append(_sent(name, arguments))
            return function(**arguments)

        return wrapped

    with contextlib.ExitStack() as stack:
        for name in COUNTED:
            stack.enter_context(mock.patch.object(dist, name, noting(name)))
        for name in REFUSED:
            error = RuntimeError(f"torch.distributed.{name} is not counted.")
            stack.enter_context(mock.patch.object(dist, name, side_effect=error))
        yield calls


def tally(calls: Sequence[Call], hidden_size: int, num_ranks: int) -> Line:
    """Add up what a rank handed over for each rank: rows, row_bytes, metadata_bytes, each [n]."""
    line = {name: [0] * num_ranks for name in ("rows", "row_bytes", "metadata_bytes")}
    for call in calls:
        is_row = call.shape in ((hidden_size,), (hidden_size + -(-hidden_size // 128),))
        for rank, rows in enumerate(call.rows_to):
            line["row_bytes" if is_row else "metadata_bytes"][rank] += rows * call.row_bytes
            line["rows"][rank] += rows * is_row
    return line


def check_counter(counter: CommunicationCounter, line: Line, num_calls: int, rank: int) -> None:
    """Assert that the counter holds what the wiretap noted on this rank."""
    rows, num_ranks = line["rows"], len(line["rows"])
    found = {"row_bytes": [0] * num_ranks, "metadata_bytes": [0] * num_ranks}
    found_rows, found_own_rows = 0, 0
    for (operation, _), traffic in counter.records.items():
        is_row = operation.removesuffix(" backward").endswith(" rows")
        kind = "row_bytes" if is_row else "metadata_bytes"
        found[kind] = [a + b for a, b in zip(found[kind], traffic.bytes_to, strict=True)]
        found_rows, found_own_rows = found_rows + is_row * traffic.rows, found_own_rows + is_row * traffic.own_rows
        assert traffic.bytes + traffic.own_bytes == sum(traffic.bytes_to), operation
        assert traffic.own_bytes == traffic.bytes_to[rank], operation
    assert found == {name: line[name] for name in found}, (found, line, counter.table())
    assert (found_rows, found_own_rows) == (sum(rows) - rows[rank], rows[rank]), (rows, counter.table())
    assert counter.total().calls == num_calls, (num_calls, counter.table())


def our_way(name: str, case: Case, groups: ProcessGroups) -> Way:
    """Return dispatch(hidden, probs, map) -> experts' output and plan, and combine(output, plan), of this library."""
    kind, fields = DISPATCHERS[name]
    dispatcher = kind(DispatcherConfig(num_moe_experts=case.num_experts, **fields), groups)

    def dispatch(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Any]:
        held, plan = dispatcher.dispatch(hidden, probs, routing_map)
        slots = gather_rows(held.tokens, held.row_ids) * held.probs.unsqueeze(-1)
        return sum_rows(slots.to(hidden.dtype), held.row_ids, held.tokens.shape[0]), plan

    return dispatch, dispatcher.combine


def peer_way(name: str, case: Case, groups: ProcessGroups) -> Way:
    """The same of megatron-core, on the CPU."""
    from tests.parity.megatron import load

    num_local = case.num_experts // groups.ep.size()
    config = load("transformer.transformer_config").TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=case.hidden_size,
        moe_ffn_hidden_size=8,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        expert_model_parallel_size=groups.ep.size(),
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    collection = load("process_groups_config").ProcessGroupCollection()
    collection.ep, collection.expt_tp, collection.tp_ep = groups.ep, groups.etp, groups.tp_ep
    state = load("parallel_state")
    state.destroy_global_memory_buffer()
    state._set_global_memory_buffer()
    first = groups.ep.rank() * num_local
    dispatcher = getattr(load("transformer.moe.token_dispatcher"), PEERS[name])(
        num_local, list(range(first, first + num_local)), config, collection
    )

    def dispatch(hidden: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, None]:
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
        rows, _, weights = dispatcher.dispatch_postprocess(*sent)
        return (rows * weights.unsqueeze(-1)).to(hidden.dtype), None

    def combine(rows: Tensor, plan: None) -> Tensor:
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))

    return dispatch, combine


def measure(name: str, case: Case, groups: ProcessGroups, calls: list[Call]) -> dict[str, Line]:
    """Run one dispatcher forward and backward on this rank and return its tally by stage."""
    num_ranks, rank = groups.ep.size(), groups.ep.rank()
    dispatch, combine = (peer_way if name in PEERS else our_way)(name, case, groups)
    routing_map = case.maps[rank]  # [T, E]
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(routing_map.shape[0], case.hidden_size, generator=generator).bfloat16().requires_grad_()
    scores = torch.rand(routing_map.shape, generator=generator)
    probs = (scores * routing_map / case.topk).requires_grad_()
    lines: dict[str, Line] = {}

    def close(stage: str) -> None:
        lines[stage] = tally(calls, case.hidden_size, num_ranks)
        if name in DISPATCHERS:
            check_counter(groups.counter, lines[stage], len(calls), rank)
        calls.clear()
        groups.counter.reset()

    calls.clear()
    expert_output, plan = dispatch(hidden, probs, routing_map)
    close("dispatch")
    returning = expert_output.detach().requires_grad_()
    output = combine(returning, plan)
    close("combine")
    output.backward(torch.ones_like(output))
    close("combine backward")
    expert_output.backward(returning.grad)
    close("dispatch backward")
    weights = probs.detach().sum(1, keepdim=True)  # [T, 1]
    tolerance = {"rtol": 2.0**-3 if name.endswith("fp8") else 2.0**-5, "atol": 2.0**-5}
    torch.testing.assert_close(output.detach().float(), weights * hidden.detach().float(), **tolerance)
    torch.testing.assert_close(hidden.grad.float(), weights.expand_as(hidden), rtol=2.0**-5, atol=2.0**-5)
    return lines


def measure_all(cases: Sequence[Case], peer: str | None) -> list[dict[str, dict[str, Line]]]:
    """Run on every rank: every dispatcher over every case; peer is a folder with megatron, "" if it is importable."""
    if peer:
        sys.path.append(peer)
    groups = ProcessGroups.build(dist.get_world_size())
    with wiretap() as calls, contextlib.ExitStack() as stack:
        if peer is not None:
            from tests.parity.megatron import on_cpu

            stack.enter_context(on_cpu())
            for name in ("Stream", "current_stream", "stream"):
                stack.enter_context(mock.patch.object(torch.cuda, name))
        names = [*DISPATCHERS, *(PEERS if peer is not None else ())]
        return [{name: measure(name, case, groups, calls) for name in names} for case in cases]
