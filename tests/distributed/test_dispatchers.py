"""One contract for every dispatcher: the same (expert, token) pairs, and outputs and gradients of the reference.

Every dispatcher, expert-parallel and expert-tensor-parallel size meets every load. Each rank rebuilds the routing of
all ranks from its seed. Memory that nobody has written yet holds NaN.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dispatchers import ExpertInput
from moe import MoEConfig, MoELayer, ProcessGroups
from moe.dispatching import build_dispatcher
from tests import reference
from tests.dispatchers.test_alltoall import HostCopies, weighted_copies
from tests.distributed.test_layer import PARAMETERS, FixedRouter, differences, failures_of, full, local_part, nan_memory
from tests.ranks import run_ranks
from tests.reference import MoEWeights

NUM_EXPERTS, HIDDEN, FFN, LARGEST = 8, 6, 10, 19
FACTORINGS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)]  # ep, etp
UNEVEN = (5, 0, LARGEST, 9, 3, 1, 0, 7)

CAPACITY = {
    "moe_pad_expert_input_to_capacity": True,
    "moe_expert_capacity_factor": float(NUM_EXPERTS),
    "moe_expert_capacity_tokens": LARGEST,
}
DISPATCHERS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "alltoall, 3 chunks": {"moe_dispatch_num_chunks": 3},
    "alltoall, deterministic": {"moe_deterministic": True},
    "alltoall, deterministic, 2 chunks": {"moe_deterministic": True, "moe_dispatch_num_chunks": 2},
    "alltoall, padded slots": {"moe_router_padding_for_quantization": True, "moe_dispatch_num_chunks": 2},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "allgather, 2 chunks": {"moe_token_dispatcher_type": "allgather", "moe_dispatch_num_chunks": 2},
    "deduplicated": {"moe_token_dispatcher_type": "deduplicated"},
    "flex, padded slots, 3 chunks": {
        "moe_token_dispatcher_type": "flex",
        "moe_dispatch_num_chunks": 3,
        "moe_router_padding_for_quantization": True,
    },
    "deduplicated, nodes": {"moe_token_dispatcher_type": "deduplicated", "moe_dispatch_node_size": 2},
    "deduplicated, nodes, 2 chunks": {
        "moe_token_dispatcher_type": "deduplicated",
        "moe_dispatch_node_size": 2,
        "moe_dispatch_num_chunks": 2,
    },
    "capacity": CAPACITY,
    "capacity, padded slots": {**CAPACITY, "moe_router_padding_for_quantization": True},
}


@dataclass(frozen=True)
class Load:
    """Who has how many tokens, and where they go."""

    tokens: tuple[int, ...] = UNEVEN
    kind: str = "skewed"  # balanced, skewed, one expert

    def routing(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return probs [T, E], of any sum, and the map [T, E] of a rank."""
        num_tokens, generator = self.tokens[rank], torch.Generator().manual_seed(rank)
        token, expert = torch.arange(num_tokens).unsqueeze(1), torch.arange(NUM_EXPERTS)
        if self.kind == "balanced":
            routing_map = (expert - 3 * token) % NUM_EXPERTS < 2
        elif self.kind == "one expert":
            routing_map = (expert == 5).expand(num_tokens, -1)
        else:
            routing_map = torch.rand(num_tokens, NUM_EXPERTS, generator=generator) < 0.9 / (1 + expert)
            routing_map[:1], routing_map[1:2] = False, True  # no expert, and all of them
        probs = torch.randn(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64)
        return probs * routing_map, routing_map.clone()


LOADS = {
    "balanced": Load((8,) * 8, "balanced"),
    "skewed, empty ranks": Load(),
    "one expert": Load(kind="one expert"),
    "T = 1": Load((1,) * 8),
    "one token in all": Load((0, 1, 0, 0, 0, 0, 0, 0), "balanced"),
    "T = 0": Load((0,) * 8),
}


def make_layer(fields: dict[str, Any], groups: ProcessGroups | None, probs: Tensor, routing_map: Tensor) -> MoELayer:
    config = MoEConfig(
        hidden_size=HIDDEN,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=FFN,
        moe_router_topk=2,
        params_dtype=torch.float64,
        moe_router_dtype="fp64",
        add_bias_linear=True,
        moe_shared_expert_intermediate_size=4,
        moe_shared_expert_overlap=True,
        moe_shared_expert_gate=True,
        **({"moe_check_collectives": True} | fields),
    )
    layer = MoELayer(config, groups)
    layer.router = FixedRouter(probs, routing_map)
    tensors = weights_of().tensors()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name in PARAMETERS:  # the router is fixed, and biases of the shared expert are zero
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(local_part(tensors[PARAMETERS[name]], parameter))
    return layer


@cache
def weights_of() -> MoEWeights:
    return reference.random_weights(NUM_EXPERTS, HIDDEN, FFN, seed=3, shared_ffn_size=4, biases=True)


def tokens_of(rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, 1, H] and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 + rank)
    pair = [torch.randn(num_tokens, 1, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)]
    return pair[0], pair[1]


@dataclass(frozen=True)
class Expected:
    """What the reference says of one rank: output, gradients of hidden states, of probs, and of the weights."""

    output: Tensor
    hidden: Tensor
    probs: Tensor
    weights: dict[str, Tensor]


@cache
def expect(load_name: str, rank: int) -> Expected:
    load_, weights = LOADS[load_name], weights_of()
    probs, routing_map = load_.routing(rank)
    hidden, output_gradient = tokens_of(rank, load_.tokens[rank])
    flat, leaf = hidden.reshape(-1, HIDDEN).requires_grad_(), probs.requires_grad_()
    act = partial(reference.activation, "silu")
    names = ("fc1", "fc2", "fc1_bias", "fc2_bias")
    tensors = [weights.tensors()[name].detach().requires_grad_() for name in names]
    output = reference.experts(flat, leaf, routing_map, *tensors[:2], act, *tensors[2:])
    shared = (weights.shared_fc1, weights.shared_fc2)
    output = output + reference.shared_expert(flat, *shared, act, gate=weights.shared_gate)
    gradients = torch.autograd.grad(
        output, [flat, leaf, *tensors], output_gradient.view_as(output), allow_unused=True, materialize_grads=True
    )
    by_name = dict(zip(names, gradients[2:], strict=True))
    return Expected(output.detach(), gradients[0], gradients[1] * routing_map, by_name)


def seen_pairs(expert_input: ExpertInput, first_expert: int) -> list[tuple[int, tuple[float, ...], float]]:
    """Return (expert, token values, prob) of every real slot."""
    pairs, start = [], 0
    for local, count in enumerate(expert_input.tokens_per_expert_list):
        for slot in range(start, start + count):
            row, prob = int(expert_input.row_ids[slot]), float(expert_input.probs[slot])
            if row >= 0 and prob != 0:  # an empty slot of capacity mode is a row of zeros with the prob 0
                pairs.append((first_expert + local, tuple(expert_input.tokens[row].tolist()), prob))
        start += count
    return sorted(pairs)


def expected_pairs(load_name: str, groups: ProcessGroups) -> list[tuple[int, tuple[float, ...], float]]:
    """Return what the experts of this rank must see of all ranks."""
    pairs, num_local = [], NUM_EXPERTS // groups.ep.size()
    for rank in range(dist.get_world_size()):
        probs, routing_map = LOADS[load_name].routing(rank)
        hidden = tokens_of(rank, LOADS[load_name].tokens[rank])[0].view(-1, HIDDEN)
        for token, expert in routing_map.nonzero().tolist():
            if expert // num_local == groups.ep.rank():
                pairs.append((expert, tuple(hidden[token].tolist()), float(probs[token, expert])))
    return sorted(pairs)


def check_contract(fields: dict[str, Any], load_name: str, groups: ProcessGroups) -> list[str]:
    rank, load_ = dist.get_rank(), LOADS[load_name]
    hidden, output_gradient = tokens_of(rank, load_.tokens[rank])
    checked = {"moe_check_collectives": load_name == "skewed, empty ranks"}
    layer = make_layer({**fields, **checked}, groups, *load_.routing(rank))
    seen: list[tuple[int, tuple[float, ...], float]] = []
    first_expert = groups.ep.rank() * NUM_EXPERTS // groups.ep.size()
    layer.experts.register_forward_pre_hook(lambda _, args: seen.extend(seen_pairs(args[0], first_expert)))
    hidden.requires_grad_()
    output = layer(hidden)
    output.backward(output_gradient)
    expected = expect(load_name, rank)
    checks = {
        "output": (output.view(-1, HIDDEN), expected.output),
        "gradient of hidden_states": (hidden.grad.view(-1, HIDDEN), expected.hidden),
        "gradient of probs": (layer.router.probs.grad, expected.probs),
    }
    for name, linear in (("fc1", layer.experts.linear_fc1), ("fc2", layer.experts.linear_fc2)):
        for suffix, parameter in (("", linear.weight), ("_bias", linear.bias)):
            total = sum(expect(load_name, r).weights[name + suffix] for r in range(dist.get_world_size()))
            checks[f"gradient of {name}{suffix}"] = (full(parameter.grad), total)
    found = differences(checks)
    if sorted(seen) != expected_pairs(load_name, groups):
        found.append("experts see other (expert, token) pairs")
    return found


def contract_worker(ep: int, etp: int) -> list[str]:
    groups, found = ProcessGroups.build(ep, etp), []
    with nan_memory():
        for name, fields in DISPATCHERS.items():
            for load_name in LOADS:
                found += [f"{name}, {load_name}: {line}" for line in check_contract(fields, load_name, groups)]
    return found


@pytest.mark.parametrize(("ep", "etp"), FACTORINGS)
def test_every_dispatcher_keeps_the_contract(ep: int, etp: int) -> None:
    assert failures_of(run_ranks(contract_worker, ep * etp, ep, etp, timeout_s=240)) == ""


def identity_worker(ep: int, etp: int) -> list[str]:
    """Experts that return their input, one per token with the prob 1: what comes back is what was sent, bit by bit."""
    groups, found, rank = ProcessGroups.build(ep, etp), [], dist.get_rank()
    for name, fields in DISPATCHERS.items():
        config = MoEConfig(hidden_size=3, num_moe_experts=NUM_EXPERTS, moe_ffn_hidden_size=2, **fields)
        dispatcher = build_dispatcher(config, groups)
        for sequence, batch in ((1, 1), (1, 7), (5, 3), (0, 2), (2, rank), (rank, 1)):
            hidden = torch.randn(sequence, batch, 3).requires_grad_()
            routing_map = torch.zeros(sequence * batch, NUM_EXPERTS, dtype=torch.bool)
            routing_map[torch.arange(sequence * batch), torch.randint(NUM_EXPERTS, (sequence * batch,))] = True
            expert_input, plan = dispatcher.dispatch(hidden, routing_map.float(), routing_map)
            output = dispatcher.combine(weighted_copies(expert_input, groups.etp.rank()), plan)
            output.backward(hidden.detach() * 2)
            if not torch.equal(output, hidden) or not torch.equal(hidden.grad, hidden * 2):
                found.append(f"{name}: S {sequence}, B {batch}")
            if expert_input.row_ids.dtype != torch.int64 or expert_input.tokens_per_expert.dtype != torch.int64:
                found.append(f"{name}: {expert_input.row_ids.dtype} ids")
    return found


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2)])
def test_identity_experts_return_the_input(ep: int, etp: int) -> None:
    assert failures_of(run_ranks(identity_worker, ep * etp, ep, etp)) == ""


def calls_worker(ep: int, etp: int) -> dict[str, Any]:
    """Return for each dispatcher the collectives of this rank with their numbers, and its copies to the host."""
    groups, result, rank = ProcessGroups.build(ep, etp), {}, dist.get_rank()
    for name, fields in DISPATCHERS.items():
        for load_name in ("skewed, empty ranks", "T = 0"):
            groups.counter.reset()
            layer = make_layer({**fields, "moe_check_collectives": False}, groups, *LOADS[load_name].routing(rank))
            hidden = tokens_of(rank, LOADS[load_name].tokens[rank])[0].requires_grad_()
            with HostCopies() as forward:
                loss = layer(hidden).sum()
            with HostCopies() as backward:
                loss.backward()
            calls = {key: traffic.calls for key, traffic in groups.counter.records.items()}
            result[f"{name}, {load_name}"] = (calls, forward.calls, backward.calls)
    return result


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (2, 2)])
def test_every_rank_calls_the_same_collectives_and_copies_once_to_the_host(ep: int, etp: int) -> None:
    results = run_ranks(calls_worker, 4, ep, etp)
    assert results == [results[0]] * 4
    for name, (calls, forward, backward) in results[0].items():
        assert backward == [], name
        assert forward == ([] if "capacity" in name else ["cpu"]), name
        ways = {operation.removesuffix(" backward") for operation, _ in calls if "counts" not in operation}
        for way in ways - {"all_to_all dispatch ids", "all_to_all dispatch map"}:
            numbers = {
                calls.get((operation, group))
                for group in ("ep", "etp", "tp_ep")
                for operation in (way, f"{way} backward")
            }
            assert len(numbers - {None}) == 1, (name, way, calls)
