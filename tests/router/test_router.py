"""TopKRouter: dtypes, gradients, losses in the graph, counters, padding, every way to choose and to limit; copies."""

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.parallel import ProcessGroups
from router import RouterConfig, TopKRouter, apply_input_jitter, balanced_experts, sinkhorn
from tests import reference
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
    {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 2.5, "moe_router_topk": 3},
    {"moe_router_fusion": True, "moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 0.5},
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
        logits,
        topk,
        score_function=score_function,
        pre_softmax=router.config.moe_router_pre_softmax,
        scaling_factor=router.config.moe_router_topk_scaling_factor,
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
    probs.sum().backward()
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


@pytest.mark.parametrize("name", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"])
@pytest.mark.parametrize("fused", [False, True])
def test_loss_gradient_is_linear_in_its_coefficient(fused: bool, name: str) -> None:
    hidden, options = _hidden(11, 3), {**EXACT, "moe_router_fusion": fused}

    def with_loss(coeff: float) -> TopKRouter:
        if name == "z_loss":
            return _router(**options, moe_z_loss_coeff=coeff)
        return _router(**options, moe_router_load_balancing_type=name, moe_aux_loss_coeff=coeff)

    main = _weight_gradient(_router(**options), hidden)
    once, thrice = (_weight_gradient(with_loss(coeff), hidden) - main for coeff in (0.1, 0.3))
    assert once.abs().max() > 1e-3
    assert_close(thrice, 3 * once)
    assert torch.equal(_weight_gradient(with_loss(0.3).eval(), hidden), main)
    assert torch.equal(_weight_gradient(with_loss(0.0), hidden), main)
    assert torch.equal(_weight_gradient(_router(**options, moe_router_load_balancing_type="none"), hidden), main)


def test_counters_and_loss_buffers_advance_in_training_alone() -> None:
    router, hidden = _router(**LOSSES, **EXACT), _hidden(33)
    assert router.tokens_per_expert.tolist() == [0] * NUM_EXPERTS
    for _ in range(2):
        probs, routing_map = router(hidden)
        probs.sum().backward()
    state = {name: buffer.clone() for name, buffer in router.named_buffers()}
    assert torch.equal(state["tokens_per_expert"], 2 * routing_map.sum(0))
    logits = hidden @ router.weight.t()
    assert_close(state["aux_loss"], reference.aux_loss(logits, TOPK, 1.0))
    assert_close(state["z_loss"], reference.z_loss(logits, 1.0))
    other = _hidden(7, seed=3)
    router(other)  # no backward, so it was not part of a step
    router(hidden)
    with torch.no_grad():
        router(other)
    with torch.inference_mode():
        router(other)
    router.eval()(other)[0].sum().backward()
    for name, buffer in router.named_buffers():
        assert torch.equal(buffer, state[name]), name
    router.reset_parameters()
    assert router.loss_scale.item() == 1.0
    assert not any(buffer.any() for name, buffer in router.named_buffers() if name != "loss_scale")


def test_copies_and_state_dict() -> None:
    router, hidden = _router(add_bias_linear=True, **LOSSES), _hidden(33, dtype=torch.float32)
    router(hidden)[0].sum().backward()
    copied = copy.deepcopy(router)
    assert copied.loss_groups == router.loss_groups
    for (name, left), right in zip(copied.state_dict(keep_vars=True).items(), router.parameters(), strict=True):
        assert torch.equal(left, right), name
        assert left.data_ptr() != right.data_ptr()
    copied(hidden)[0].sum().backward()
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
        assert left.tokens_per_expert.sum() == 2 * 33
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


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_padding_tokens_leave_no_trace(mode: dict[str, object]) -> None:
    router, hidden = _router(**EXACT, **LOSSES, **mode), _hidden(11, 3)
    padding = torch.rand(11, 3, generator=torch.Generator().manual_seed(4)) < 0.4
    spoilt = hidden.masked_fill(padding.unsqueeze(-1), torch.nan).requires_grad_()
    probs, routing_map = router(spoilt, padding)
    upstream = _hidden(33, seed=2)[:, :NUM_EXPERTS]
    (probs * upstream).sum().backward()
    gradients = [parameter.grad.clone() for parameter in router.parameters()]
    state = {name: buffer.clone() for name, buffer in router.named_buffers()}

    router.zero_grad()
    router.tokens_per_expert.zero_()
    valid = hidden[~padding].requires_grad_()
    expected_probs, expected_map = router(valid)
    (expected_probs * upstream.view(11, 3, -1)[~padding]).sum().backward()
    flat = padding.flatten()
    assert not probs[flat].any()
    assert not routing_map[flat].any()
    assert_close(probs[~flat], expected_probs)
    assert torch.equal(routing_map[~flat], expected_map)
    assert not spoilt.grad[padding].any()
    assert_close(spoilt.grad[~padding], valid.grad)
    for actual, parameter in zip(gradients, router.parameters(), strict=True):
        assert_close(actual, parameter.grad)
    for name, buffer in router.named_buffers():
        assert_close(state[name], buffer, torch.float32, what=name)


def test_everything_padded_routes_nothing() -> None:
    router = _router(**EXACT, **LOSSES)
    probs, routing_map = router(_hidden(7), torch.ones(7, dtype=torch.bool))
    probs.sum().backward()
    assert not probs.any()
    assert not routing_map.any()
    assert not router.weight.grad.any()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(3, 11, dtype=torch.bool), r"padding_mask \(\[3, 11\], torch.bool\) must be bool of .* \[11, 3\]"),
        (torch.zeros(11, 3), r"padding_mask \(\[11, 3\], torch.float32\) must be bool"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _router()(_hidden(11, 3, dtype=torch.float32), mask)


BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        BIASED,
        {**BIASED, "moe_router_num_groups": 5, "moe_router_group_topk": 2},
        {"moe_router_force_load_balancing": "balanced"},
    ],
    ids=str,
)
def test_losses_count_the_plain_choice_whatever_is_routed(fields: dict[str, object], fused: bool) -> None:
    router, hidden = _router(**EXACT, **fields, **LOSSES, moe_router_fusion=fused), _hidden(33)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.tensor([9.0, 9, 0, 0, 0]))
    probs, routing_map = router(hidden)
    (gradient,) = torch.autograd.grad((probs * 0.0).sum(), router.weight)
    logits = hidden @ router.weight.t()
    score_function = router.config.moe_router_score_function
    assert not torch.equal(routing_map, reference.largest(logits, TOPK))
    (expected,) = torch.autograd.grad(_reference_losses(logits, TOPK, score_function), router.weight)
    assert_close(gradient, expected)


@pytest.mark.parametrize("move", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double()])
def test_expert_bias_keeps_every_bit_through_moves(move: Callable[[TopKRouter], TopKRouter]) -> None:
    router = _router(**BIASED)
    values = torch.tensor([1.0000001, -0.30000001, 1e-7, 3.3333333, 0.0])
    router.expert_bias.copy_(values)
    moved = move(router)
    assert moved.weight.dtype != torch.float32
    assert moved.expert_bias.dtype == torch.float32
    assert torch.equal(moved.expert_bias, values)
    restored = _router(**BIASED).bfloat16()
    restored.load_state_dict(moved.state_dict())
    assert torch.equal(restored.expert_bias, values)
    assert list(router.state_dict()) == ["weight", "expert_bias"]
    empty = _router(**BIASED).to("meta").bfloat16().to_empty(device="cpu")
    assert empty.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_expert_bias_moves_the_choice_and_counts_before_capacity(fused: bool) -> None:
    router = _router(**EXACT, **BIASED, moe_router_fusion=fused, moe_expert_capacity_factor=0.5)
    router.expert_bias.copy_(torch.tensor([5.0, 0, 0, 0, 5]))
    probs, routing_map = router(_hidden(20))
    probs.sum().backward()
    capacity = 4  # 20 tokens * 2 / 5 experts * 0.5
    assert routing_map.sum(0).tolist() == [capacity, 0, 0, 0, capacity]
    assert router.local_tokens_per_expert.tolist() == [20, 0, 0, 0, 20]
    assert router.tokens_per_expert.tolist() == [20, 0, 0, 0, 20]
    assert router.dropped_tokens_per_expert.tolist() == [16, 0, 0, 0, 16]
    assert router.added_tokens_per_expert.tolist() == [0] * 5


@pytest.mark.parametrize("training", [True, False])
def test_jitter_multiplies_the_input_in_training(training: bool) -> None:
    router, hidden = _router(**EXACT, moe_input_jitter_eps=0.25).train(training), _hidden(33)
    torch.manual_seed(5)
    probs, _ = router(hidden)
    torch.manual_seed(5)
    noise = torch.empty_like(hidden).uniform_(0.75, 1.25) if training else torch.ones_like(hidden)
    assert_close(probs, reference.router(hidden * noise, router.weight, TOPK)[0])
    assert torch.equal(probs, router(hidden)[0]) is not training


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("fields", [{"moe_input_jitter_eps": 0.25}, {"moe_router_force_load_balancing": True}], ids=str)
def test_noise_is_the_same_in_recomputation(fields: dict[str, object], use_reentrant: bool) -> None:
    upstream = _hidden(33, seed=2)[:, :NUM_EXPERTS]
    gradients, counts = [], []
    for recompute in (False, True):
        router, hidden = _router(**EXACT, **LOSSES, **fields), _hidden(33).requires_grad_()
        torch.manual_seed(5)
        if recompute:
            probs, _ = checkpoint(router, hidden, use_reentrant=use_reentrant)
        else:
            probs, _ = router(hidden)
        torch.randn(3)  # whatever draws numbers before backward
        (probs * upstream).sum().backward()
        gradients.append([hidden.grad, router.weight.grad])
        counts.append(router.tokens_per_expert)
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
    assert torch.equal(*counts)
    assert counts[0].sum() == 33 * TOPK


def test_random_logits_pass_gradients_as_if_nothing_had_happened() -> None:
    router, hidden = _router(**EXACT, moe_router_force_load_balancing="random"), _hidden(400).requires_grad_()
    torch.manual_seed(5)
    probs, routing_map = router(hidden)
    torch.manual_seed(5)
    random = torch.randn(400, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    expected, expected_map = reference.routing(random, TOPK)
    assert torch.equal(routing_map, expected_map)
    assert_close(probs, expected)
    upstream = _hidden(400, seed=2)[:, :NUM_EXPERTS]
    (probs * upstream).sum().backward()
    (gradient,) = torch.autograd.grad((expected * upstream).sum(), random)
    assert_close(hidden.grad, gradient @ router.weight)
    assert routing_map.sum(0).max() < 1.3 * 400 * TOPK / NUM_EXPERTS


@pytest.mark.parametrize("fused", [False, True])
def test_forced_balance_weights_a_fixed_choice(fused: bool) -> None:
    router = _router(**EXACT, moe_router_force_load_balancing="balanced", moe_router_fusion=fused)
    hidden = _hidden(7).requires_grad_()
    probs, routing_map = router(hidden)
    assert routing_map.long().tolist()[:3] == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [1, 0, 0, 0, 1]]
    assert sorted(routing_map.sum(0).tolist()) == [2, 3, 3, 3, 3]
    logits = hidden @ router.weight.t()
    expected = reference.weights_on_map(logits, routing_map, TOPK)
    assert_close(probs, expected)
    upstream = _hidden(7, seed=2)[:, :NUM_EXPERTS]
    gradients = [
        torch.autograd.grad((value * upstream).sum(), hidden, retain_graph=True)[0] for value in (probs, expected)
    ]
    assert_close(*gradients)


def test_balanced_choice_takes_ranks_in_turn() -> None:
    ids = balanced_experts(5, 3, 8, 4, torch.device("cpu"))  # experts 0 1 | 2 3 | 4 5 | 6 7
    assert ids.tolist() == [[0, 2, 4], [6, 1, 3], [5, 7, 0], [2, 4, 6], [1, 3, 5]]


@pytest.mark.parametrize(("topk", "training"), [(1, True), (2, True), (2, False)])
def test_sinkhorn_chooses_in_training_and_weights_as_megatron(topk: int, training: bool) -> None:
    router = _router(**EXACT, moe_router_load_balancing_type="sinkhorn", moe_router_topk=topk, moe_z_loss_coeff=0.1)
    hidden = _hidden(40) + router.weight[0].detach()  # most tokens like expert 0
    router.train(training)
    probs, routing_map = router(hidden)
    logits = (hidden @ router.weight.t()).detach()
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    assert_close(probs, scores * routing_map)
    chosen = reference.largest(sinkhorn(logits) if training else logits, topk)
    assert torch.equal(routing_map, chosen)
    load = routing_map.sum(0).double()
    plain = reference.largest(logits, topk).sum(0).double()
    if training:
        assert load.std() < plain.std()
    else:
        assert torch.equal(load, plain)


def test_quantile_balancing_chooses_by_its_bias_and_counts_quantiles() -> None:
    fields = {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_score_function": "sigmoid"}
    router, hidden = _router(**EXACT, **fields), _hidden(35)
    router.qb_beta.copy_(torch.tensor([0.5, -0.5, 0.0, 0.25, -0.25]))
    probs, routing_map = router(hidden)
    logits = (hidden @ router.weight.t()).detach()
    assert torch.equal(routing_map, reference.largest(logits - router.qb_beta, TOPK))
    assert_close(probs, reference.weights_on_map(logits, routing_map, TOPK, "sigmoid"))
    assert not router.qb_beta_sum.any()
    probs.sum().backward()
    third = torch.tensor([sorted((row - router.qb_beta).tolist())[-TOPK - 1] for row in logits], dtype=torch.float64)
    columns = (logits - third.unsqueeze(1)).t()
    quantile = torch.tensor([sorted(column.tolist())[-(35 * TOPK // NUM_EXPERTS) - 1] for column in columns])
    assert_close(router.qb_beta_sum, quantile, torch.float32)
    assert router.qb_beta_count.item() == 1
    router(hidden, torch.ones(35, dtype=torch.bool))[0].sum().backward()  # nobody has a say
    router(hidden[:0])[0].sum().backward()
    with torch.no_grad():
        router(hidden)
    router.eval()(hidden)
    assert router.qb_beta_count.item() == 1
    assert_close(router.qb_beta_sum, quantile, torch.float32)


@pytest.mark.parametrize("policy", ["nearest", "up", "down"])
def test_token_rounding_is_for_training_and_keeps_other_weights(policy: str) -> None:
    fields = {"moe_token_rounding_policy": policy, "moe_token_rounding_multiple": 4}
    router, plain, hidden = _router(**EXACT, **fields), _router(**EXACT), _hidden(33)
    probs, routing_map = router(hidden)
    probs.sum().backward()
    expected, chosen = plain(hidden)
    assert (routing_map.sum(0) % 4 == 0).all()
    both = routing_map & chosen
    assert_close(probs[both], expected[both])
    logits = (hidden @ router.weight.t()).detach()
    total = torch.where(chosen, logits.exp(), 0.0).sum(1, keepdim=True)
    added = routing_map & ~chosen
    assert_close(probs[added], (logits.exp() / total)[added])
    assert torch.equal(router.added_tokens_per_expert, added.sum(0))
    assert torch.equal(router.dropped_tokens_per_expert, (chosen & ~routing_map).sum(0))
    assert torch.equal(router.tokens_per_expert, chosen.sum(0))
    assert torch.equal(router.eval()(hidden)[1], chosen)


def test_added_weights_are_bounded_where_the_choice_is_forced() -> None:
    fields = {"moe_token_rounding_policy": "up", "moe_token_rounding_multiple": 16}
    router = _router(**EXACT, **fields, moe_router_force_load_balancing="balanced")
    hidden = (_hidden(33) * 100).requires_grad_()
    probs, routing_map = router(hidden)
    assert (routing_map.sum(0) % 16 == 0).all()
    assert probs.max() <= 1.0
    probs.sum().backward()
    assert hidden.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


def test_token_rounding_of_padded_tokens_has_finite_gradients() -> None:
    router, hidden = _router(**EXACT, moe_token_rounding_policy="up", moe_token_rounding_multiple=4), _hidden(33)
    padding = torch.rand(33, generator=torch.Generator().manual_seed(4)) < 0.4
    leaf = hidden.requires_grad_()
    gradients = []
    for arguments in ((leaf, padding), (leaf[~padding],)):
        probs, _ = router(*arguments)
        upstream = _hidden(33, seed=2)[:, :NUM_EXPERTS]
        weight = upstream if len(arguments) == 2 else upstream[~padding]
        gradients.append(torch.autograd.grad((probs * weight).sum(), [leaf, router.weight]))
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_capacity_limits_and_pads_without_a_host_sync(pad: bool, policy: str) -> None:
    fields = {
        "moe_expert_capacity_factor": 0.75,
        "moe_token_drop_policy": policy,
        "moe_pad_expert_input_to_capacity": pad,
    }
    router, hidden = _router(**EXACT, **fields), _hidden(31)
    probs, routing_map = router(hidden)
    capacity = 10  # ceil(31 * 2 / 5 * 0.75)
    assert (routing_map.sum(0) == capacity).all() if pad else (routing_map.sum(0) <= capacity).all()
    expected, chosen = _router(**EXACT)(hidden)
    kept = routing_map & chosen
    assert_close(probs, expected * kept)
    assert (chosen & ~kept).sum() > 0
    meta = _router(**fields).to("meta")
    meta_probs, meta_map = meta(
        torch.empty(31, HIDDEN_SIZE, device="meta"), torch.empty(31, dtype=torch.bool, device="meta")
    )
    meta_probs.sum().backward()
    assert meta_map.shape == (31, NUM_EXPERTS)


def test_zero_computation_experts_are_more_columns() -> None:
    fields = {"moe_num_null_experts": 1, "moe_num_identity_experts": 2, "moe_num_constant_experts": 1}
    router, hidden = _router(**EXACT, **LOSSES, **fields), _hidden(33)
    assert router.weight.shape == (NUM_EXPERTS + 4, HIDDEN_SIZE)
    probs, routing_map = router(hidden)
    expected, expected_map = reference.router(hidden, router.weight, TOPK)
    assert torch.equal(routing_map, expected_map)
    assert_close(probs, expected)
    real = routing_map[:, :NUM_EXPERTS].sum(1)
    assert set(real.tolist()) == {0, 1, 2}


def test_what_is_decided_is_printed() -> None:
    shown = repr(
        _router(
            **BIASED,
            moe_router_num_groups=5,
            moe_router_group_topk=2,
            moe_expert_capacity_factor=1.5,
            moe_router_fusion=True,
        )
    )
    for part in ("topk=2", "score=sigmoid", "groups=2 of 5", "expert_bias=True", "capacity=1.5", "fusion=torch"):
        assert part in shown


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("fields", [LOSSES, {**BIASED, "moe_expert_capacity_factor": 0.5}], ids=str)
def test_a_compiled_router_decides_and_counts_the_same(fields: dict[str, object]) -> None:
    router, twin, hidden = _router(**EXACT, **fields), _router(**EXACT, **fields), _hidden(33)
    probs, routing_map = torch.compile(router, backend="aot_eager")(hidden)
    expected, expected_map = twin(hidden)
    assert torch.equal(routing_map, expected_map)
    assert_close(probs, expected)
    for value, module in ((probs, router), (expected, twin)):
        (value * torch.arange(1.0, NUM_EXPERTS + 1)).sum().backward()
        assert module.tokens_per_expert.sum() == 33 * TOPK
    assert_close(router.weight.grad, twin.weight.grad)


def test_a_router_alone_can_be_pickled() -> None:
    router, hidden = _router(**EXACT, **LOSSES), _hidden(33)
    assert torch.equal(pickle.loads(pickle.dumps(router))(hidden)[0], router(hidden)[0])


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_jitter_of_narrow_tokens_is_finer_than_their_dtype(eps: float) -> None:
    jittered = apply_input_jitter(torch.ones(4000, 2, dtype=torch.bfloat16), eps, torch.float32)
    assert jittered.dtype == torch.float32
    assert 1 - eps <= jittered.min() < 1 - 0.99 * eps
    assert 1 + 0.99 * eps < jittered.max() <= 1 + eps
    assert (jittered.mean() - 1).abs() < 0.05 * eps


@pytest.mark.parametrize("assign", [False, True])
def test_biases_are_fp32_whatever_state_is_loaded(assign: bool) -> None:
    router = _router(**BIASED)
    state = {name: tensor.bfloat16() + 0.5 for name, tensor in router.state_dict().items()}
    for module in (router, copy.deepcopy(router)):
        module.load_state_dict(state, assign=assign)
        assert module.expert_bias.dtype == torch.float32
        assert module.expert_bias.tolist() == [0.5] * NUM_EXPERTS
