"""MoELayer over every factoring of 1, 2 and 4 ranks against the fp64 reference on one process.

Every rank rebuilds the global input from its seed, runs its own part, and compares. Memory that nobody has written yet
holds NaN. Also run in place: `torchrun --nproc-per-node N -m pytest tests/distributed`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe import MoEConfig, MoELayer, ProcessGroups, finalize_gradients
from tests import reference
from tests.ranks import run_ranks
from tests.reference import MoEWeights
from tests.tolerances import assert_close

NUM_EXPERTS, HIDDEN, FFN, SHARED_FFN = 8, 12, 20, 6
WORLD_SIZES = [1, 2, 4]
UNEVEN = (5, 0, 19, 9)
ALIGNED = (16, 48, 0, 32)
PADDING = {"moe_router_padding_for_quantization": True}

PARAMETERS = {
    "router.weight": "router",
    "router.bias": "router_bias",
    "experts.linear_fc1.weight": "fc1",
    "experts.linear_fc1.bias": "fc1_bias",
    "experts.linear_fc2.weight": "fc2",
    "experts.linear_fc2.bias": "fc2_bias",
    "shared_experts.linear_fc1.weight": "shared_fc1",
    "shared_experts.linear_fc2.weight": "shared_fc2",
    "shared_experts.gate_weight": "shared_gate",
}


@dataclass(frozen=True)
class Case:
    """One situation: tokens of each rank, config fields, and experts that the router's bias keeps idle."""

    tokens: tuple[int, int, int, int] = UNEVEN
    batch: int = 1
    topk: int = 3
    aux: float = 0.0
    z: float = 0.0
    idle: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def has_biases(self) -> bool:
        return self.config.get("add_bias_linear", False) or bool(self.idle)


ONLY_EXPERT_5 = Case(
    topk=1, idle=tuple(e for e in range(NUM_EXPERTS) if e != 5), config={"moe_router_score_function": "sigmoid"}
)
CASES = {
    "plain": Case(),
    "fused": Case(config={"moe_router_fusion": True}),
    "fused, padded map, losses": Case(ALIGNED, aux=0.3, z=0.1, config={"moe_router_fusion": True, **PADDING}),
    "padded slots, aux loss": Case(aux=0.3, config=PADDING),
    "fused, one rank's map padded": Case((5, 16, 3, 0), config={"moe_router_fusion": True, **PADDING}),
    "biases": Case(config={"add_bias_linear": True}),
    "checked": Case(aux=0.3, config={"moe_check_collectives": True}),
    "recomputed": Case(config={"moe_layer_recompute": True}),
    "all at once": Case(
        ALIGNED,
        batch=2,
        aux=0.3,
        z=0.1,
        config={
            "moe_router_fusion": True,
            "moe_layer_recompute": True,
            "moe_check_collectives": True,
            "add_bias_linear": True,
            **PADDING,
        },
    ),
    "one token each": Case((1, 1, 1, 1), config=PADDING),
    "one token in all": Case((0, 0, 1, 0), aux=0.3),
    "no tokens": Case((0, 0, 0, 0), aux=0.3, z=0.1, config={"moe_router_fusion": True, **PADDING}),
    "no tokens, recomputed, checked": Case(
        (0, 0, 0, 0), config={"moe_layer_recompute": True, "moe_check_collectives": True, "add_bias_linear": True}
    ),
    "first rank alone": Case((17, 0, 0, 0)),
    "idle expert": Case(idle=(2,), config={"moe_router_fusion": True}),
    "idle ranks, padded": Case(ALIGNED, topk=2, idle=(0, 1, 2, 3), config=PADDING),
    "all to one expert": ONLY_EXPERT_5,
    "all to one expert, padded": replace(ONLY_EXPERT_5, config={**ONLY_EXPERT_5.config, **PADDING}),
    "every expert": Case(topk=NUM_EXPERTS, config={"moe_router_pre_softmax": True}),
    "gelu without gate": Case(config={"activation_func": "gelu", "gated_linear_unit": False, "add_bias_linear": True}),
    "shared expert": Case(
        config={"moe_shared_expert_intermediate_size": SHARED_FFN, "moe_shared_expert_gate": True}, batch=1
    ),
}


def factorings(world_size: int) -> list[tuple[int, int]]:
    """Return every (ep, etp) whose product divides the number of ranks."""
    sizes = range(1, world_size + 1)
    return [(ep, etp) for ep in sizes for etp in sizes if world_size % (ep * etp) == 0]


@contextmanager
def nan_memory() -> Iterator[None]:
    """Fill memory that is allocated but not written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_config(case: Case) -> MoEConfig:
    fields = {
        "hidden_size": HIDDEN,
        "num_moe_experts": NUM_EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": case.topk,
        "params_dtype": torch.float64,
        "moe_router_dtype": "fp64",
        "moe_aux_loss_coeff": case.aux,
        "moe_z_loss_coeff": case.z,
        "add_bias_linear": case.has_biases,
    }
    return MoEConfig(**(fields | case.config))


def make_weights(case: Case) -> MoEWeights:
    weights = reference.random_weights(
        NUM_EXPERTS,
        HIDDEN,
        FFN,
        seed=3,
        gate_rows=2 if make_config(case).gated_linear_unit else 1,
        biases=case.has_biases,
        shared_ffn_size=make_config(case).moe_shared_expert_intermediate_size,
    )
    if weights.router_bias is not None:
        with torch.no_grad():
            weights.router_bias[list(case.idle)] = -1e3
    return weights


def local_part(full: Tensor, parameter: Tensor) -> Tensor:
    """Cut this rank's part out of a full tensor."""
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            full = full.chunk(parameter.device_mesh.size(dim), placement.dim)[parameter.device_mesh.get_local_rank(dim)]
    return full


@torch.no_grad()
def load(layer: nn.Module, weights: MoEWeights) -> None:
    for name, parameter in layer.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(local_part(weights.tensors()[PARAMETERS[name]], parameter))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def random_batches(tokens: tuple[int, ...], batch: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each rank hidden states [S, B, H] and the gradient of its loss with respect to the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens // batch, batch, HIDDEN) for num_tokens in tokens]
    return [
        (
            torch.randn(shape, generator=generator, dtype=torch.float64),
            torch.randn(shape, generator=generator, dtype=torch.float64),
        )
        for shape in shapes
    ]


@dataclass(frozen=True)
class Expected:
    """What the reference says: by rank output and input gradient, and the mean over ranks of parameter gradients."""

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    parameter_gradients: dict[str, Tensor]


def expect(case: Case, weights: MoEWeights, batches: list[tuple[Tensor, Tensor]]) -> Expected:
    config, tensors = make_config(case), weights.tensors()
    act = partial(reference.activation, config.activation_func)
    outputs, input_gradients = [], []
    total = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for hidden_states, output_gradient in batches:
        hidden = hidden_states.reshape(-1, HIDDEN).requires_grad_()
        output = reference.moe_layer(
            hidden,
            weights,
            case.topk,
            act,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
        )
        logits = hidden @ weights.router.T + (0 if weights.router_bias is None else weights.router_bias)
        loss = (output * output_gradient.view_as(output)).sum()
        loss = loss + reference.aux_loss(logits, case.topk, case.aux) + reference.z_loss(logits, case.z)
        inputs = [hidden, *tensors.values()]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        outputs.append(output.detach().view_as(hidden_states))
        input_gradients.append(gradients[0].view_as(hidden_states))
        for name, gradient in zip(tensors, gradients[1:], strict=True):
            total[name] += gradient / len(batches)
    return Expected(outputs, input_gradients, total)


@cache
def problem(name: str, num_ranks: int) -> tuple[MoEWeights, list[tuple[Tensor, Tensor]], Expected]:
    case = CASES[name]
    weights, batches = make_weights(case), random_batches(case.tokens[:num_ranks], case.batch, seed=7)
    return weights, batches, expect(case, weights, batches)


def differences(checks: dict[str, tuple[Tensor | None, Tensor]]) -> list[str]:
    """Return one line for each tensor that is not what is expected."""
    found = []
    for what, (actual, expected) in checks.items():
        try:
            assert actual is not None, f"{what}: there is no gradient."
            assert_close(actual, expected, torch.float64, what)
        except AssertionError as error:
            found.append(str(error))
    return found


def parameter_checks(layer: nn.Module, expected: dict[str, Tensor]) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Gather the gradients: a collective."""
    return {
        f"gradient of {name}": (None if p.grad is None else full(p.grad), expected[PARAMETERS[name]])
        for name, p in layer.named_parameters()
    }


def check_case(name: str, groups: ProcessGroups) -> list[str]:
    """Run one case on this rank: forward, backward, gradients."""
    rank = dist.get_rank()
    weights, batches, expected = problem(name, dist.get_world_size())
    layer = MoELayer(make_config(CASES[name]), groups)
    load(layer, weights)
    hidden_states = batches[rank][0].clone().requires_grad_()
    output = layer(hidden_states)
    output.backward(batches[rank][1])
    missing = [f"{name} ends backward without a gradient" for name, p in layer.named_parameters() if p.grad is None]
    finalize_gradients(layer, groups)
    with torch.no_grad():
        again = layer(hidden_states)
        evaluated = layer.eval()(hidden_states)
    checks = parameter_checks(layer, expected.parameter_gradients)
    checks |= {
        "output": (output, expected.outputs[rank]),
        "output under no_grad": (again, expected.outputs[rank]),
        "output in eval": (evaluated, expected.outputs[rank]),
        "gradient of hidden_states": (hidden_states.grad, expected.input_gradients[rank]),
    }
    return missing + differences(checks)


def factoring_worker(names: list[str]) -> list[str]:
    found = []
    with nan_memory():
        for ep, etp in factorings(dist.get_world_size()):
            groups = ProcessGroups.build(ep, etp)
            for name in names:
                found += [f"ep {ep}, etp {etp}, {name}: {line}" for line in check_case(name, groups)]
    return found


def failures_of(results: list[list[str]]) -> str:
    return "\n".join(f"rank {rank}, {line}" for rank, lines in enumerate(results) for line in lines)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_factoring_equals_the_reference(world_size: int) -> None:
    assert failures_of(run_ranks(factoring_worker, world_size, list(CASES))) == ""


def test_the_cases_are_what_their_names_say() -> None:
    def load_of(name: str) -> list[int]:
        weights, batches, _ = problem(name, 4)
        hidden = torch.cat([hidden_states.reshape(-1, HIDDEN) for hidden_states, _ in batches])
        case = CASES[name]
        return reference.router(hidden, weights.router, case.topk, bias=weights.router_bias)[1].sum(0).tolist()

    assert [e for e, count in enumerate(load_of("idle expert")) if count == 0] == [2]
    assert load_of("idle ranks, padded")[:4] == [0, 0, 0, 0]
    assert load_of("all to one expert") == [0, 0, 0, 0, 0, sum(UNEVEN), 0, 0]
    assert load_of("every expert") == [sum(UNEVEN)] * NUM_EXPERTS
    assert factorings(4) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]


SPREADS = [(2, 1, 2, 1), (1, 2, 4, 1), (2, 2, 1, 1), (4, 1, 2, 2), (1, 4, 1, 2), (1, 1, 4, 1)]  # tp, cp, ep, etp


def check_spread(tp: int, cp: int, ep: int, etp: int) -> list[str]:
    """Spread each micro-batch over TP x CP ranks, two micro-batches after each other, and the rest over DP."""
    groups = ProcessGroups.build(ep, etp, tp, cp)
    case = Case((8, 8, 8, 8), batch=2, aux=0.3, z=0.1, config={"moe_router_fusion": True})
    dp_size, num_slices = groups.dp.size(), tp * cp
    weights = make_weights(case)
    batches = random_batches((8 * num_slices,) * (2 * dp_size), case.batch, seed=5)
    expected = expect(case, weights, batches)
    layer = MoELayer(make_config(case), groups)
    load(layer, weights)
    index, checks = groups.cp.rank() * tp + groups.tp.rank(), {}
    for microbatch in range(2):
        which = 2 * groups.dp.rank() + microbatch
        hidden_states, output_gradient = (whole.chunk(num_slices)[index] for whole in batches[which])
        output = layer(hidden_states)
        output.backward(output_gradient * cp)  # a mean over this rank's tokens: CP times its share of the whole mean
        checks[f"output {microbatch}"] = (output, expected.outputs[which].chunk(num_slices)[index])
    finalize_gradients(layer, groups, num_microbatches=2)
    return differences(checks | parameter_checks(layer, expected.parameter_gradients))


def spreads_worker() -> list[str]:
    return [f"tp, cp, ep, etp {spread}: {line}" for spread in SPREADS for line in check_spread(*spread)]


def test_gradients_with_losses_do_not_depend_on_how_a_micro_batch_is_spread() -> None:
    assert failures_of(run_ranks(spreads_worker, 4)) == ""


class FixedRouter(nn.Module):
    """Stands in for the router: a decision from outside, whose probs get a gradient."""

    def __init__(self, probs: Tensor, routing_map: Tensor) -> None:
        super().__init__()
        self.probs, self.routing_map = nn.Parameter(probs), routing_map

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.probs, self.routing_map


def check_fixed_routing(ep: int, etp: int) -> list[str]:
    """Tokens with no expert, with all experts, probs that do not sum to 1: output, hidden and probs gradients."""
    case = Case((7, 4, 0, 5), config={"add_bias_linear": True, **PADDING})
    rank, groups, weights = dist.get_rank(), ProcessGroups.build(ep, etp), make_weights(case)
    hidden, output_gradient = random_batches(case.tokens, 1, seed=9)[rank]
    generator = torch.Generator().manual_seed(rank)
    routing_map = torch.rand(case.tokens[rank], NUM_EXPERTS, generator=generator) < 0.4
    routing_map[:1], routing_map[1:2] = False, True
    probs = torch.randn(routing_map.shape, generator=generator, dtype=torch.float64) * routing_map

    flat, leaf = hidden.reshape(-1, HIDDEN).clone().requires_grad_(), probs.clone().requires_grad_()
    act = partial(reference.activation, "silu")
    expected = reference.experts(
        flat, leaf, routing_map, weights.fc1, weights.fc2, act, weights.fc1_bias, weights.fc2_bias
    )
    expected.backward(output_gradient.view_as(expected))

    layer = MoELayer(make_config(case), groups)
    load(layer, weights)
    layer.router = FixedRouter(probs, routing_map)
    hidden.requires_grad_()
    with nan_memory():
        output = layer(hidden)
        output.backward(output_gradient)
    return differences(
        {
            "output": (output.view_as(expected), expected),
            "gradient of hidden_states": (hidden.grad.view_as(flat), flat.grad),
            "gradient of probs": (layer.router.probs.grad, leaf.grad * routing_map),
        }
    )


def fixed_routing_worker() -> list[str]:
    return [f"ep {ep}, etp {etp}: {line}" for ep, etp in factorings(4) for line in check_fixed_routing(ep, etp)]


def test_a_fixed_decision_with_any_probs() -> None:
    assert failures_of(run_ranks(fixed_routing_worker, 4)) == ""


def idle_gradient_worker(ep: int) -> list[Any]:
    """Return the gradients of experts that saw no token, as backward leaves them."""
    case = CASES["all to one expert"]
    layer = MoELayer(make_config(case), ProcessGroups.build(ep))
    load(layer, make_weights(case))
    with nan_memory():
        layer(random_batches(case.tokens, 1, seed=7)[dist.get_rank()][0]).sum().backward()
    grads = {name: full(p.grad) for name, p in layer.named_parameters() if name.startswith("experts")}
    return [
        (name, grad.layout, [int(grad[e].count_nonzero()) for e in range(NUM_EXPERTS)]) for name, grad in grads.items()
    ]


def test_experts_without_tokens_end_backward_with_zero_gradients() -> None:
    for gradients in run_ranks(idle_gradient_worker, 4, 4):
        assert len(gradients) == 4
        for name, layout, num_nonzero in gradients:
            assert layout == torch.strided, name
            assert num_nonzero[5] > 0, name
            assert sum(num_nonzero) == num_nonzero[5], name


def interleaved_worker(ep: int, etp: int) -> list[str]:
    """Run two layers and two micro-batches interleaved, and again one after the other: equal bit by bit."""
    groups = ProcessGroups.build(ep, etp)
    case = CASES["fused"]
    batches = [random_batches(case.tokens, 1, seed)[dist.get_rank()] for seed in (1, 2)]
    layers = []
    for _ in range(4):
        layers.append(MoELayer(make_config(case), groups))
        load(layers[-1], make_weights(case))
    first, second, alone_first, alone_second = layers
    outputs = [layer(x) for x, _ in batches for layer in (first, second)]
    for output, (_, grad) in zip(outputs, (batches[0], batches[0], batches[1], batches[1]), strict=True):
        output.backward(grad)
    alone = []
    for layer in (alone_first, alone_second):
        for x, grad in batches:
            alone.append(layer(x))
            alone[-1].backward(grad)
    found = [f"output {i}" for i, j in enumerate((0, 2, 1, 3)) if not torch.equal(outputs[i], alone[j])]
    for layer, expected in ((first, alone_first), (second, alone_second)):
        for (name, p), q in zip(layer.named_parameters(), expected.parameters(), strict=True):
            if not torch.equal(full(p.grad), full(q.grad)):
                found.append(f"gradient of {name}")
    return found


def test_interleaved_layers_and_micro_batches_do_not_meet() -> None:
    assert failures_of(run_ranks(interleaved_worker, 4, 2, 2)) == ""


def record(monkeypatch: pytest.MonkeyPatch, log: list[tuple[Any, ...]], name: str) -> None:
    """Note name, dtype and row shape of each call of a collective of torch.distributed."""
    collective = getattr(dist, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        log.append((name, args[1].dtype, tuple(args[1].shape[1:])))
        return collective(*args, **kwargs)

    monkeypatch.setattr(dist, name, recorded)


def collectives_worker(tokens: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Return the collectives of forward and of backward, as this rank called them."""
    case = replace(CASES["plain"], tokens=tokens)
    layer = MoELayer(make_config(case), ProcessGroups.build(2, 2))
    load(layer, make_weights(case))
    hidden_states = random_batches(tokens, 1, seed=7)[dist.get_rank()][0].requires_grad_()
    log: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("all_to_all_single", "all_gather"):
            record(monkeypatch, log, name)
        output = layer(hidden_states)
        forward = list(log)
        output.sum().backward()
    return forward, log[len(forward) :]


@pytest.mark.parametrize("tokens", [UNEVEN, (0, 0, 0, 0)])
def test_every_rank_calls_the_same_collectives(tokens: tuple[int, ...]) -> None:
    results = run_ranks(collectives_worker, 4, tokens)
    counts, rows, probs = (
        ("all_gather", torch.int64, ()),
        ("all_to_all_single", torch.float64, (HIDDEN,)),
        ("all_to_all_single", torch.float64, ()),
    )
    assert results == [results[0]] * 4
    forward, backward = results[0]
    assert forward == [counts, rows, probs, rows, probs, rows, rows]
    assert backward[:2] == [rows, rows]
    assert sorted(backward[2:], key=str) == sorted([rows, probs, rows, probs], key=str)
