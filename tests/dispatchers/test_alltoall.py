"""The all-to-all dispatcher: where rows go, what is copied, synchronised and saved, and that nothing stays behind."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dispatchers import DispatcherConfig, ExpertInput, MoEAlltoAllTokenDispatcher, gather_rows, sum_rows
from moe.parallel import ProcessGroups
from tests.ranks import run_ranks

# t0 -> e0 e2, t1 -> e2, t2 -> e0 e1
ROUTING_MAP = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
PROBS = torch.tensor([[0.1, 0, 0.3, 0], [0, 0, 0.6, 0], [0.7, 0.8, 0, 0]], dtype=torch.float64)
FACTORINGS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
NUM_EXPERTS = 8


def dispatcher_for(
    num_experts: int, groups: ProcessGroups | None = None, pad_multiple: int = 1, check: bool = False
) -> MoEAlltoAllTokenDispatcher:
    config = DispatcherConfig(num_moe_experts=num_experts, moe_check_collectives=check)
    return MoEAlltoAllTokenDispatcher(config, groups, pad_multiple=pad_multiple)


def weighted_copies(expert_input: ExpertInput, etp_rank: int = 0) -> Tensor:
    """Experts that return their input times the prob; of an expert-tensor group the first rank does it all."""
    is_real = expert_input.row_ids >= 0
    row_ids = expert_input.row_ids[is_real]
    copies = gather_rows(expert_input.tokens, row_ids) * expert_input.probs[is_real].unsqueeze(-1)
    return sum_rows(copies * (etp_rank == 0), row_ids, expert_input.tokens.shape[0])


def random_routing(num_tokens: int, topk: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return probs [T, E] that are 1 / topk where routed, and the map."""
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(topk).indices, True)
    return routing_map / topk, routing_map


def test_dispatch_by_hand() -> None:
    hidden_states = torch.tensor([[[1.0]], [[2.0]], [[3.0]]], dtype=torch.float64)  # [S, B, H] = [3, 1, 1]
    expert_input, plan = dispatcher_for(4).dispatch(hidden_states, PROBS, ROUTING_MAP)
    assert expert_input.tokens.tolist() == [[1], [2], [3]]
    assert expert_input.row_ids.tolist() == [0, 2, 2, 0, 1]
    assert expert_input.probs.tolist() == [0.1, 0.7, 0.8, 0.3, 0.6]
    assert expert_input.tokens_per_expert.tolist() == [2, 1, 2, 0]
    assert expert_input.tokens_per_expert_list == (2, 1, 2, 0)
    assert not expert_input.has_padding
    output = dispatcher_for(4).combine(weighted_copies(expert_input), plan)
    expected = torch.tensor([[[0.4]], [[1.2]], [[4.5]]], dtype=torch.float64)
    torch.testing.assert_close(output, expected, rtol=1e-15, atol=0)


def test_slot_padding_by_hand() -> None:
    hidden_states = torch.ones(3, 1, dtype=torch.float64)
    expert_input, _ = dispatcher_for(4, pad_multiple=3).dispatch(hidden_states, PROBS, ROUTING_MAP)
    assert expert_input.row_ids.tolist() == [0, 2, -1, 2, -1, -1, 0, 1, -1]
    assert expert_input.probs.tolist() == [0.1, 0.7, 0, 0.8, 0, 0, 0.3, 0.6, 0]
    assert expert_input.tokens_per_expert.tolist() == [3, 3, 3, 0]
    assert expert_input.tokens_per_expert_list == (3, 3, 3, 0)
    assert expert_input.has_padding
    assert expert_input.num_slots_list == (2, 1, 2, 0)


def test_one_rank_moves_and_copies_no_row() -> None:
    hidden_states = torch.randn(5, 2, 3)
    dispatcher = dispatcher_for(NUM_EXPERTS)
    expert_input, plan = dispatcher.dispatch(hidden_states, *random_routing(10, 3, seed=0))
    assert expert_input.tokens.data_ptr() == hidden_states.data_ptr()
    assert expert_input.tokens.shape == (10, 3)
    expert_output = torch.randn(10, 3)
    output = dispatcher.combine(expert_output, plan)
    assert output.data_ptr() == expert_output.data_ptr()
    assert output.shape == (5, 2, 3)


@pytest.mark.parametrize("shape", [(0, 1), (3, 0), (1, 1), (1, 7), (6, 1), (4, 3)])
@pytest.mark.parametrize("topk", [1, 2])  # more copies of x / topk do not add up exactly
@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_identity_experts_return_the_input(shape: tuple[int, int], topk: int, pad_multiple: int) -> None:
    hidden_states = torch.randn(*shape, 3)
    dispatcher = dispatcher_for(NUM_EXPERTS, pad_multiple=pad_multiple)
    expert_input, plan = dispatcher.dispatch(hidden_states, *random_routing(shape[0] * shape[1], topk, seed=1))
    assert torch.equal(dispatcher.combine(weighted_copies(expert_input), plan), hidden_states)


@pytest.mark.parametrize("name", ["probs", "routing_map"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (3,)])
def test_dispatch_refuses_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    arguments = {"probs": PROBS, "routing_map": ROUTING_MAP} | {name: torch.zeros(shape, dtype=torch.bool)}
    with pytest.raises(ValueError, match=rf"{name} \(\[.*\]\) must have the shape \[tokens, experts\] = \[3, 4\]"):
        dispatcher_for(4).dispatch(torch.zeros(3, 1), **arguments)


def check_identity(groups: ProcessGroups, pad_multiple: int, check: bool) -> list[str]:
    """Every rank has another number of tokens, some none: what comes back is what was sent, bit by bit."""
    found, rank, etp_rank = [], dist.get_rank(), groups.etp.rank()
    dispatcher = dispatcher_for(NUM_EXPERTS, groups, pad_multiple, check)
    for shape in ((rank, 2), (3 - rank, 1), (0, 1), (1, 1), (5, 3 if rank == 2 else 0)):
        for topk in (1, 2):
            hidden_states = torch.randn(*shape, 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            probs, routing_map = random_routing(shape[0] * shape[1], topk, seed=rank)
            expert_input, plan = dispatcher.dispatch(hidden_states, probs, routing_map)
            output = dispatcher.combine(weighted_copies(expert_input, etp_rank), plan)
            output.backward(hidden_states.detach() * 2)
            if not torch.equal(output, hidden_states):
                found.append(f"output of {shape}, topk {topk}, padded to {pad_multiple}")
            if hidden_states.grad is None or not torch.equal(hidden_states.grad, hidden_states * 2):
                found.append(f"gradient of {shape}, topk {topk}, padded to {pad_multiple}")
    return found


def check_destinations(groups: ProcessGroups) -> list[str]:
    """Each expert's ranks see exactly the (source rank, token) pairs that the maps of all ranks send there."""
    world_size, num_local = dist.get_world_size(), NUM_EXPERTS // groups.ep.size()
    tokens_of = [5 * source % 7 for source in range(world_size)]  # 0 5 3 1
    peers = sorted(dist.get_process_group_ranks(groups.tp_ep))
    routings = [random_routing(num_tokens, 3, seed=source) for source, num_tokens in enumerate(tokens_of)]
    rank = dist.get_rank()
    names = torch.stack([torch.full((tokens_of[rank],), float(rank)), torch.arange(tokens_of[rank]).float()], 1)
    probs = torch.rand(tokens_of[rank], NUM_EXPERTS) + rank
    expert_input, plan = dispatcher_for(NUM_EXPERTS, groups, pad_multiple=4).dispatch(names, probs, routings[rank][1])
    slots = expert_input.row_ids.split(list(expert_input.tokens_per_expert_list))
    slot_probs = expert_input.probs.split(list(expert_input.tokens_per_expert_list))
    found = []
    for local, (row_ids, weights) in enumerate(zip(slots, slot_probs, strict=True)):
        expert = groups.ep.rank() * num_local + local
        expected = [(s, t) for s in peers for t in range(tokens_of[s]) if routings[s][1][t, expert]]
        got = [tuple(expert_input.tokens[row].int().tolist()) for row in row_ids[row_ids >= 0]]
        if sorted(got) != sorted(expected):
            found.append(f"expert {expert} got {sorted(got)}, not {expected}")
        if len(row_ids) != -(-len(expected) // 4) * 4 or expert_input.tokens_per_expert[local] != len(row_ids):
            found.append(f"expert {expert} has {len(row_ids)} slots")
        if weights[row_ids < 0].any() or weights[row_ids >= 0].int().tolist() != [source for source, _ in got]:
            found.append(f"expert {expert} has probs {weights.tolist()}")
    for name, ids in (
        ("row_ids", expert_input.row_ids),
        ("tokens_per_expert", expert_input.tokens_per_expert),
        ("token_ids", plan.token_ids),
    ):
        if ids.dtype != torch.int64:
            found.append(f"{name} is {ids.dtype}")
    return found


def check_in_flight(groups: ProcessGroups) -> list[str]:
    """Two dispatches before their combines, which come in the other order; the dispatcher keeps nothing."""
    dispatcher, etp_rank = dispatcher_for(NUM_EXPERTS, groups), groups.etp.rank()
    kept = dict(dispatcher.__dict__)
    batches = []
    for seed in (1, 2):
        num_tokens = (seed * 3 + dist.get_rank()) % 5
        hidden_states = torch.randn(num_tokens, 3, generator=torch.Generator().manual_seed(seed))
        batches.append((hidden_states, dispatcher.dispatch(hidden_states, *random_routing(num_tokens, 2, seed))))
    found = []
    for hidden_states, (expert_input, plan) in reversed(batches):
        if not torch.equal(dispatcher.combine(weighted_copies(expert_input, etp_rank), plan), hidden_states):
            found.append("a second dispatch changes what the first combine returns")
    return found + (["the dispatcher has kept something"] if dispatcher.__dict__ != kept else [])


def all_factorings_worker() -> list[str]:
    found = []
    for ep, etp in FACTORINGS:
        groups = ProcessGroups.build(ep, etp)
        lines = check_identity(groups, 1, True) + check_identity(groups, 16, False)
        lines += check_destinations(groups) + check_in_flight(groups)
        found += [f"ep {ep}, etp {etp}: {line}" for line in lines]
    return found


def test_rows_go_to_their_experts_and_come_back() -> None:
    assert run_ranks(all_factorings_worker, 4) == [[]] * 4


def saved_bytes(function: Callable[[], Any], *alive: Tensor) -> int:
    """Return the bytes that autograd keeps for backward, each storage once, without those of tensors alive anyway."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()  # held, so that no storage is used twice
    for tensor in alive:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(storages.values())


def saved_worker(ep: int, etp: int, hidden_size: int, pad_multiple: int) -> tuple[int, int, int]:
    """Return the bytes saved by dispatch and combine, the slots sent and the slots held."""
    num_tokens, topk = 40 + dist.get_rank(), 3
    dispatcher = dispatcher_for(NUM_EXPERTS, ProcessGroups.build(ep, etp), pad_multiple)
    hidden_states = torch.randn(num_tokens, hidden_size, requires_grad=True)
    probs, routing_map = random_routing(num_tokens, topk, seed=dist.get_rank())
    probs = (probs.requires_grad_() * 1.0).clone()  # not alive elsewhere
    num_held = 0

    def way() -> tuple[Any, ...]:
        nonlocal num_held
        expert_input, plan = dispatcher.dispatch(hidden_states, probs, routing_map)
        num_held = len(expert_input.row_ids)
        expert_output = (expert_input.tokens + 1) + 0 * expert_input.probs.sum()
        return expert_input, plan, dispatcher.combine(expert_output, plan)

    return saved_bytes(way), num_tokens * topk, num_held


def saved_per_factoring_worker() -> dict[tuple[int, int, int, int], tuple[int, int, int]]:
    cases = [(ep, etp, hidden, pad) for ep, etp in FACTORINGS for hidden in (8, 64) for pad in (1, 16)]
    return {case: saved_worker(*case) for case in cases}


def test_saved_for_backward_are_indices_alone() -> None:
    for by_case in run_ranks(saved_per_factoring_worker, 4):
        for (ep, etp, hidden, pad), (num_bytes, sent, held) in by_case.items():
            arrived = held
            if pad > 1:
                arrived = by_case[ep, etp, hidden, 1][2]
            expected = 8 * sent if ep * etp == 1 else 16 * sent + 8 * arrived
            expected += 8 * arrived if pad > 1 else 0
            assert num_bytes == expected, (ep, etp, hidden, pad)


class HostCopies(TorchFunctionMode):
    """Notes every call that copies a device tensor to the host; results of `.cpu()` count as host tensors.

    On a machine without a device those calls copy nothing; their names are what is counted.
    """

    COPIES = ("cpu", "item", "tolist", "numpy", "nonzero", "masked_select", "unique")
    CONVERSIONS = ("__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.on_host: list[Tensor] = []

    def is_on_host(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(value is tensor for tensor in self.on_host)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        from_host = any(self.is_on_host(value) for value in args)
        if name in (*self.COPIES, *self.CONVERSIONS) and not from_host:
            self.calls.append(name)
        if name == "cpu" or from_host:
            results = result if isinstance(result, tuple | list) else (result,)
            self.on_host.extend(value for value in results if isinstance(value, Tensor))
        return result


def test_the_counter_sees_copies_and_follows_host_tensors() -> None:
    counted: Counter[str] = Counter()
    values = torch.arange(3)
    for way in (
        lambda: values.cpu().sum().tolist(),
        lambda: bool(values.any()),
        lambda: int(values[1]),
        lambda: values.nonzero(),
        lambda: values.sum(),
        lambda: values.max().item(),
    ):
        with HostCopies() as copies:
            way()
        counted.update(copies.calls)
    assert counted == {"cpu": 1, "__bool__": 1, "__int__": 1, "nonzero": 1, "item": 1}


def host_copies_worker() -> list[tuple[list[str], list[str]]]:
    calls = []
    for ep, etp in FACTORINGS:
        dispatcher = dispatcher_for(NUM_EXPERTS, ProcessGroups.build(ep, etp), pad_multiple=16)
        hidden_states = torch.randn(9, 3, requires_grad=True)
        probs, routing_map = random_routing(9, 2, seed=dist.get_rank())
        probs.requires_grad_()
        with HostCopies() as forward:
            expert_input, plan = dispatcher.dispatch(hidden_states, probs, routing_map)
        expert_output = expert_input.tokens * expert_input.probs.sum()
        with HostCopies() as rest:
            dispatcher.combine(expert_output, plan).sum().backward()
        calls.append((forward.calls, rest.calls))
    return calls


def test_one_host_copy_in_dispatch_and_none_after_it() -> None:
    assert run_ranks(host_copies_worker, 4) == [[(["cpu"], [])] * len(FACTORINGS)] * 4
