"""TopKRouter: dtypes, gradients, losses in the graph, counters, copies; and the losses over ranks."""

import copy
import gc
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.parallel import ProcessGroups, finalize_gradients
from router import RouterConfig, TopKRouter
from tests import reference
from tests.ranks import run_ranks
from tests.tolerances import assert_close

HIDDEN_SIZE, NUM_EXPERTS, TOPK = 6, 5, 2
AUX_COEFF, Z_COEFF = 0.3, 0.02
LOSSES = {"moe_aux_loss_coeff": AUX_COEFF, "moe_z_loss_coeff": Z_COEFF}
EXACT = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
MODES = [
    {},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid"},
    {"moe_router_fusion": True, "add_bias_linear": True},
    {"moe_router_fusion": True, "moe_router_score_function": "sigmoid", "moe_router_topk": 1},
]


def _router(seed: int = 0, groups: ProcessGroups | None = None, **fields: object) -> TopKRouter:
    torch.manual_seed(seed)
    router = TopKRouter(RouterConfig(hidden_size=HIDDEN_SIZE, num_moe_experts=NUM_EXPERTS, **fields), groups)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64))
    return router


def _hidden(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def _reference_losses(logits: Tensor, topk: int = TOPK, score_function: str = "softmax") -> Tensor:
    return reference.aux_loss(logits, topk, AUX_COEFF, score_function) + reference.z_loss(logits, Z_COEFF)


@pytest.mark.parametrize("losses", [{}, LOSSES], ids=["main", "losses"])
@pytest.mark.parametrize("shape", [(7, 3), (0, 3), (1,)], ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gradients_equal_the_reference(mode: dict[str, object], shape: tuple[int, ...], losses: dict) -> None:
    router = _router(**EXACT, **mode, **losses)
    hidden = _hidden(*shape).requires_grad_()
    probs, routing_map = router(hidden)
    upstream = _hidden(probs.shape[0], seed=2)[:, :NUM_EXPERTS]
    leaves = [hidden, *router.parameters()]
    gradients = torch.autograd.grad((probs * upstream).sum(), leaves)

    score_function, topk = router.config.moe_router_score_function, router.config.moe_router_topk
    logits = hidden.reshape(-1, HIDDEN_SIZE) @ router.weight.t() + (0 if router.bias is None else router.bias)
    expected_probs, expected_map = reference.routing(
        logits, topk, score_function=score_function, pre_softmax=router.config.moe_router_pre_softmax
    )
    objective = (expected_probs * upstream).sum()
    if losses:
        objective = objective + _reference_losses(logits, topk, score_function)
    assert_close(probs, expected_probs, what="probs")
    assert torch.equal(routing_map, expected_map)
    names = ("hidden", *dict(router.named_parameters()))
    for name, actual, expected in zip(names, gradients, torch.autograd.grad(objective, leaves), strict=True):
        assert_close(actual, expected, what=name)


@pytest.mark.parametrize("module_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("router_dtype", ["fp32", "fp64"])
def test_routing_keeps_its_dtype(router_dtype: str, dtype: torch.dtype, module_dtype: torch.dtype) -> None:
    router = _router(moe_router_dtype=router_dtype, **LOSSES).to(module_dtype)
    hidden = _hidden(33, dtype=dtype)
    wanted = {"fp32": torch.float32, "fp64": torch.float64}[router_dtype]
    probs, routing_map = router(hidden)
    assert (probs.dtype, routing_map.dtype, router.weight.dtype) == (wanted, torch.bool, module_dtype)
    expected_probs, expected_map = reference.router(hidden.to(wanted).double(), router.weight.to(wanted).double(), TOPK)
    assert_close(probs, expected_probs)  # to fp32 or fp64: nothing between logits and probs was coarser
    assert torch.equal(routing_map, expected_map)
    assert (router.aux_loss.dtype, router.z_loss.dtype) == (torch.float32, torch.float32)
    assert router.tokens_per_expert.dtype == torch.int64
    router.to(dtype)
    assert router.tokens_per_expert.tolist() == expected_map.sum(0).tolist()


def test_autocast_changes_nothing() -> None:
    router, hidden = _router(**LOSSES), _hidden(33, dtype=torch.float32)
    expected, _ = router(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probs, _ = router(hidden)
    assert torch.equal(probs, expected)


def _weight_gradient(router: TopKRouter, hidden: Tensor) -> Tensor:
    router.zero_grad()
    probs, _ = router(hidden)
    (probs * torch.arange(1.0, NUM_EXPERTS + 1)).sum().backward()
    return router.weight.grad


@pytest.mark.parametrize("name", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
@pytest.mark.parametrize("fused", [False, True])
def test_loss_gradient_is_linear_in_its_coefficient(fused: bool, name: str) -> None:
    hidden, options = _hidden(33), {**EXACT, "moe_router_fusion": fused}
    main = _weight_gradient(_router(**options), hidden)
    once, thrice = (_weight_gradient(_router(**options, **{name: coeff}), hidden) - main for coeff in (0.1, 0.3))
    assert once.abs().max() > 1e-3
    assert_close(thrice, 3 * once)
    assert torch.equal(_weight_gradient(_router(**options, **{name: 0.3}).eval(), hidden), main)
    off = {"moe_router_load_balancing_type": "none"} if name == "moe_aux_loss_coeff" else {}
    assert torch.equal(_weight_gradient(_router(**options, **off), hidden), main)


def test_counters_and_loss_buffers_advance_in_training_alone() -> None:
    router, hidden = _router(**LOSSES, **EXACT), _hidden(33)
    assert router.tokens_per_expert.tolist() == [0] * NUM_EXPERTS
    for _ in range(2):
        _, routing_map = router(hidden)
    state = {name: buffer.clone() for name, buffer in router.named_buffers()}
    assert torch.equal(state["tokens_per_expert"], 2 * routing_map.sum(0))
    logits = hidden @ router.weight.t()
    assert_close(state["aux_loss"], reference.aux_loss(logits, TOPK, 1.0))
    assert_close(state["z_loss"], reference.z_loss(logits, 1.0))
    other = _hidden(7, seed=3)
    with torch.no_grad():
        router(other)
    with torch.inference_mode():
        router(other)
    router.eval()(other)
    for name, buffer in router.named_buffers():
        assert torch.equal(buffer, state[name]), name
    router.reset_parameters()
    assert not any(buffer.any() for buffer in router.buffers())


def test_copies_and_state_dict() -> None:
    router, hidden = _router(add_bias_linear=True, **LOSSES), _hidden(33, dtype=torch.float32)
    router(hidden)
    copied = copy.deepcopy(router)
    assert copied.tp_cp_group is router.tp_cp_group
    for (name, left), right in zip(copied.state_dict(keep_vars=True).items(), router.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert left.data_ptr() != right.data_ptr()
    copied(hidden)
    assert torch.equal(copied.tokens_per_expert, 2 * router.tokens_per_expert)

    state = router.state_dict()
    assert list(state) == ["weight", "bias"]
    other = _router(seed=5, add_bias_linear=True, **LOSSES)
    assert not torch.equal(other(hidden)[0], router(hidden)[0])
    other.load_state_dict(state)
    assert torch.equal(other(hidden)[0], router(hidden)[0])


def test_two_routers_interleaved_give_the_results_of_separate_runs() -> None:
    hidden = _hidden(33)
    alone, together = ([_router(seed, **EXACT, **LOSSES) for seed in (1, 2)] for _ in range(2))
    for router in alone:
        _weight_gradient(router, hidden)
    results = [router(hidden)[0] for router in together]
    for probs in results:
        (probs * torch.arange(1.0, NUM_EXPERTS + 1)).sum().backward()
    for left, right in zip(together, alone, strict=True):
        assert torch.equal(left.weight.grad, right.weight.grad)
        assert all(map(torch.equal, left.buffers(), right.buffers()))


@pytest.mark.parametrize("fused", [False, True])
def test_forwards_without_backward_leave_nothing_behind(fused: bool) -> None:
    router, hidden = _router(moe_router_fusion=fused, **LOSSES), _hidden(7, dtype=torch.float32)
    counts = []
    for _ in range(3):
        for _ in range(50):
            router(hidden)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 10


@pytest.mark.parametrize("fused", [False, True])
def test_forward_and_backward_need_no_host_sync(fused: bool) -> None:
    router = _router(moe_router_fusion=fused, **LOSSES).to("meta")  # any read of a value raises there
    probs, _ = router(torch.empty(7, 3, HIDDEN_SIZE, device="meta"))
    probs.sum().backward()
    assert router.weight.grad.shape == (NUM_EXPERTS, HIDDEN_SIZE)


def test_wrong_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_states \(\(7, 12\)\) must end in hidden_size \(6\)"):
        _router()(torch.randn(7, 2 * HIDDEN_SIZE))


SLICES = {1: [13], 2: [4, 9], 4: [0, 5, 1, 7]}  # tokens of one micro-batch on each rank that shares it
LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2), (1, 1)], 4: [(4, 1), (1, 4), (2, 2), (2, 1), (1, 2), (1, 1)]}  # TP, CP


def _losses_over_ranks(layouts: list[tuple[int, int]], fields: dict[str, object]) -> list[dict[str, Tensor]]:
    results = []
    for tp, cp in layouts:
        groups = ProcessGroups.build(tensor_model_parallel_size=tp, context_parallel_size=cp)
        router = _router(groups=groups, **EXACT, **LOSSES, **fields)
        micro_batch = _hidden(13, seed=10 + groups.dp.rank())
        bounds = [0, *torch.tensor(SLICES[tp * cp]).cumsum(0).tolist()]
        start, end = list(pairwise(bounds))[groups.tp_cp.rank()]
        probs, _ = router(micro_batch[start:end])
        (probs * 0.0).sum().backward()
        finalize_gradients(router, groups)
        losses = torch.stack([router.aux_loss, router.z_loss]) / dist.get_world_size()
        dist.all_reduce(losses)
        results.append({"gradient": router.weight.grad, "losses": losses, "counts": router.tokens_per_expert})
    return results


@pytest.mark.parametrize("fields", [{}, {"moe_router_score_function": "sigmoid", "moe_router_fusion": True}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_gradient_does_not_depend_on_the_layout(world_size: int, fields: dict[str, object]) -> None:
    ranks = run_ranks(_losses_over_ranks, world_size, LAYOUTS[world_size], fields)
    score_function = fields.get("moe_router_score_function", "softmax")
    weight = _router(**EXACT).weight
    for index, (tp, cp) in enumerate(LAYOUTS[world_size]):
        num_micro_batches = world_size // (tp * cp)
        logits = [_hidden(13, seed=10 + number) @ weight.t() for number in range(num_micro_batches)]
        objective = sum(_reference_losses(part, TOPK, score_function) for part in logits) / num_micro_batches
        (gradient,) = torch.autograd.grad(objective, weight)
        losses = torch.stack(
            [reference.aux_loss(part, TOPK, 1.0, score_function) for part in logits]
            + [reference.z_loss(part, 1.0) for part in logits]
        ).view(2, -1)
        counts = sum(reference.largest(part, TOPK).sum(0) for part in logits)
        for rank in ranks:
            assert_close(rank[index]["gradient"], gradient, what=f"gradient, tp {tp} cp {cp}")
            assert_close(rank[index]["losses"], losses.mean(1), what=f"losses, tp {tp} cp {cp}")
        assert torch.equal(sum(rank[index]["counts"] for rank in ranks), counts)
