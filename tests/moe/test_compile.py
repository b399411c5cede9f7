"""torch.compile: one graph, the values and the state of eager mode, and few compilations."""

import copy
import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import router.router
from moe import MoEConfig, MoEGPT, MoELayer, MoETransformerBlock, TransformerConfig
from router import RoutingRecords

SIZES = {"hidden_size": 16, "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
AUX = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01}
GLOBAL = {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
ZERO = {"moe_num_null_experts": 1, "moe_num_identity_experts": 1, "moe_num_constant_experts": 1}
SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
FP8 = {"fp8": "e4m3", "fp8_recipe": "tensorwise", "hidden_size": 32, "moe_ffn_hidden_size": 32}
OPTIONS = {
    "default": {},
    "fused, losses": {"moe_router_fusion": True, **AUX},
    "expert bias, shared, recompute": {**BIAS, **SHARED, "moe_layer_recompute": True},
    "capacity": CAPACITY,
    "zero experts": ZERO,
    "groups, losses by sequence": {**GROUPS, **AUX, "moe_router_load_balancing_type": "seq_aux_loss"},
}
SLOW_OPTIONS = {
    "losses": AUX,
    "global": GLOBAL,
    "fused sqrtsoftplus": {"moe_router_fusion": True, "moe_router_score_function": "sqrtsoftplus", **AUX},
    "pre-softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "capacity by position": {**CAPACITY, "moe_token_drop_policy": "position"},
    "static shapes": {**CAPACITY, "moe_pad_expert_input_to_capacity": True},
    "rounding": {"moe_token_rounding_policy": "nearest", "moe_token_rounding_multiple": 4},
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing"},
    "expert choice": {"moe_router_type": "expert_choice"},
    "balanced": {"moe_router_force_load_balancing": "balanced"},
    "jitter": {"moe_input_jitter_eps": 0.01},
    "overlap, chunks, latent": {
        **SHARED,
        "moe_shared_expert_gate": False,
        "moe_shared_expert_overlap": True,
        "moe_dispatch_num_chunks": 2,
        "moe_latent_size": 8,
    },
    "biases, deterministic": {"add_bias_linear": True, "moe_deterministic": True},
    "fp8": FP8,
    "fp8 weights": {**FP8, "fp8_param": True},
    "padded map": {**FP8, "moe_router_padding_for_quantization": True},
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # graphs hold tensors in cycles, and other tests count what is alive


def twins(module_class=MoELayer, config_class=MoEConfig, **options):
    """Return a module and its equal."""
    torch.manual_seed(0)
    module = module_class(config_class(**{**SIZES, **options}))
    return module, copy.deepcopy(module)


def compiled(module, backend="aot_eager"):
    """Return the module in one graph, and what counts its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, backend=counter), counter


def inputs(num_tokens, *, width=16, dtype=torch.float32, seed=1):
    """Return hidden states [S, 2, H] and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, 2, width, generator=generator).to(dtype) for _ in range(2)]


def step(run, module, hidden, grad, *args):
    """Return output, gradients and state after a forward and backward."""
    module.zero_grad()
    hidden = hidden.clone().requires_grad_()
    torch.manual_seed(3)
    output = run(hidden, *args)
    output.backward(grad)
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input": hidden.grad, **grads, **state(module)}


def state(module):
    """Return a copy of all buffers."""
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(found, expected, rtol=0.0):
    """Compare by name; rtol is relative to the largest value, 0 asks for the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or rtol == 0 or not value.is_floating_point():
            same = found[name] is value is None or torch.equal(found[name], value)
            assert same, name
        else:
            atol = rtol * value.abs().max().item() if value.numel() else 0.0
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def check_options(options, backend, rtol, *, dtype=torch.float32, masked=(False, True), lengths=(8, 8, 12, 5, 20)):
    eager, twin = twins(params_dtype=dtype, **options)
    for is_masked in masked:
        torch._dynamo.reset()
        run, counter = compiled(twin, backend)
        for seed, length in enumerate(lengths):
            hidden, grad = inputs(length, width=eager.config.hidden_size, dtype=dtype, seed=seed)
            mask = [torch.arange(2 * length).view(length, 2) % 5 == 0] if is_masked else []
            expected = step(eager, eager, hidden, grad, *mask)
            assert_same(step(run, twin, hidden, grad, *mask), expected, rtol)
        assert counter.frame_count <= 3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_graph_gives_what_eager_mode_gives(options):
    fused = "moe_router_fusion" in options  # its in-place products are separate ones in a graph
    check_options(options, "aot_eager", 1e-6 if fused else 0.0, masked=(True,))


@pytest.mark.slow
@pytest.mark.parametrize("options", (OPTIONS | SLOW_OPTIONS).values(), ids=OPTIONS | SLOW_OPTIONS)
def test_every_other_option_with_and_without_a_mask(options):
    check_options(options, "aot_eager", 1e-6 if "moe_router_fusion" in options else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_inductor_agrees_to_rounding(options, dtype):
    check_options(options, "inductor", 2e-6 if dtype == torch.float32 else 2e-2, dtype=dtype, masked=(True,))


def test_bf16_and_the_compilations_of_many_counts_and_lengths():
    eager, twin = twins(params_dtype=torch.bfloat16, **AUX)
    run, counter = compiled(twin)
    for seed in range(6):
        hidden, grad = inputs(8, dtype=torch.bfloat16, seed=seed)
        assert_same(step(run, twin, hidden, grad), step(eager, eager, hidden, grad))
    assert counter.frame_count == 1  # whatever the experts got
    for length in (9, 16, 3, 1, 64):
        hidden, grad = inputs(length, dtype=torch.bfloat16, seed=length)
        assert_same(step(run, twin, hidden, grad), step(eager, eager, hidden, grad))
    assert counter.frame_count <= 3


def test_a_length_marked_dynamic_compiles_once():
    _, twin = twins()
    run, counter = compiled(twin)
    for length in (8, 12, 30):
        hidden, grad = inputs(length)
        torch._dynamo.mark_dynamic(hidden, 0)
        run(hidden).backward(grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("options", [GLOBAL, {**BIAS, **AUX}], ids=["global", "expert bias"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_micro_batches_in_flight_count_and_scale_as_their_backward_runs(options, backend):
    eager, twin = twins(**options)
    results = []
    for run, module in ((eager, eager), (compiled(twin, backend)[0], twin)):
        outputs = [run(inputs(6, seed=seed)[0]) for seed in range(3)]
        module.router.loss_scale.fill_(8.0)
        for output in reversed(outputs):
            output.square().sum().backward()
        results.append({name: parameter.grad for name, parameter in module.named_parameters()} | state(module))
    assert_same(results[1], results[0], 0.0 if backend == "aot_eager" else 2e-6)
    assert results[0]["router.tokens_per_expert"].sum() == 3 * 6 * 2 * 2


def test_without_gradients_nothing_is_counted_and_a_frozen_router_counts_in_forward():
    eager, twin = twins(**AUX)
    run, _ = compiled(twin)
    hidden, _ = inputs(6)
    with torch.no_grad():
        assert torch.equal(run(hidden), eager(hidden))
    for module in (eager, twin):
        module.eval()
    assert torch.equal(run(hidden), eager(hidden))
    assert_same(state(twin), state(eager))
    assert twin.router.tokens_per_expert.sum() == 0
    for module in (eager, twin):
        module.train().router.requires_grad_(False)
    for _ in range(2):
        run(hidden).sum().backward()
        eager(hidden).sum().backward()
    assert_same(state(twin), state(eager))
    assert twin.router.tokens_per_expert.sum() == 2 * 6 * 2 * 2


def test_frozen_experts_get_no_gradient():
    eager, twin = twins()
    for module in (eager, twin):
        module.experts.requires_grad_(False)
    hidden, grad = inputs(6)
    found = step(compiled(twin)[0], twin, hidden, grad)
    assert_same(found, step(eager, eager, hidden, grad))
    assert found["experts.linear_fc1.weight"] is None


def test_backward_twice_and_checkpoint_around():
    eager, twin = twins(**AUX)
    run, _ = compiled(twin)
    (hidden, grad), results = inputs(6), []
    for forward, module in ((eager, eager), (run, twin)):
        twice, once = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
        output = forward(twice)
        output.backward(grad, retain_graph=True)
        output.backward(grad)
        module.reset_parameters()
        module.router.tokens_per_expert.zero_()
        checkpoint(forward, once, use_reentrant=False).backward(grad)
        results.append({"twice": twice.grad, "once": once.grad, **state(module)})
    assert_same(results[1], results[0])


def test_training_a_copy_follows_eager_mode_and_the_state_dict_is_the_same():
    eager, twin = twins(**BIAS, **AUX)
    run, _ = compiled(twin)
    run(inputs(8)[0])  # what was compiled for the original must not serve its copy
    copied = copy.deepcopy(twin)
    copied_run, _ = compiled(copied)
    pairs = [(eager, eager), (copied_run, copied)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for _, module in pairs]
    before = twin.experts.linear_fc1.weight.clone()
    for seed in range(4):
        hidden, grad = inputs(8, seed=seed)
        for (forward, _), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            forward(hidden).backward(grad)
            optimizer.step()
    assert_same(dict(copied.state_dict()), dict(eager.state_dict()))
    assert not torch.equal(copied.experts.linear_fc1.weight, before)
    assert torch.equal(twin.experts.linear_fc1.weight, before)
    assert twin.handle.module is twin
    assert copied.router.handle.module is copied.router


def test_nothing_is_kept_after_backward():
    _, twin = twins()
    run, _ = compiled(twin)
    freed = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.watch = _Watch(freed)
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx, grad):
            return grad

    twin.experts.register_forward_hook(lambda _, __, output: Watched.apply(output))
    for _ in range(2):
        hidden, grad = inputs(6)
        output = run(hidden)
        assert not freed
        output.backward(grad)
        del output
        assert freed
        freed.clear()


class _Watch:
    """Tells when it is freed."""

    def __init__(self, freed):
        self.freed = freed

    def __del__(self):
        self.freed.append(True)


GPT = {**AUX, "num_attention_heads": 2, "num_layers": 2, "vocab_size": 32}


def test_a_block_is_one_graph():
    block, twin = twins(MoETransformerBlock, TransformerConfig, **GPT)
    hidden, grad = inputs(6)
    found = step(compiled(twin)[0], twin, hidden, grad)
    assert_same(found, step(block, block, hidden, grad), 1e-6)


@pytest.mark.slow
def test_a_model_is_one_graph():
    model, twin = twins(MoEGPT, TransformerConfig, **GPT)
    run, counter = compiled(twin)
    for length in (6, 8, 10):
        tokens = torch.randint(32, (2, length), generator=torch.Generator().manual_seed(length))
        for forward in (model, run):
            forward(tokens, tokens).backward()
    grads = ({name: value.grad for name, value in module.named_parameters()} for module in (twin, model))
    assert_same(*grads, 1e-6)
    assert_same(state(twin), state(model), 1e-6)
    assert counter.frame_count <= 3


def test_sinkhorn_leaves_the_graph_or_says_why_it_cannot():
    eager, twin = twins(moe_router_load_balancing_type="sinkhorn")
    hidden, grad = inputs(6)
    with pytest.raises(RuntimeError, match="'sinkhorn' has no fixed number of iterations"):
        compiled(twin)[0](hidden)
    found = step(torch.compile(twin, backend="aot_eager"), twin, hidden, grad)
    assert_same(found, step(eager, eager, hidden, grad))


def test_records_leave_the_graph_or_say_why_they_cannot():
    eager, twin = twins(**AUX)
    hidden, grad = inputs(6)
    with pytest.raises(RuntimeError, match="RoutingRecords records and replays outside"), RoutingRecords().record(twin):
        compiled(twin)[0](hidden)
    torch._dynamo.reset()
    records, results = RoutingRecords(), []
    with records.record(eager):
        eager(hidden)
    for forward, module in ((eager, eager), (torch.compile(twin, backend="aot_eager"), twin)):
        module.router.reset_parameters()  # other weights: the record decides
        with records.replay(module):
            results.append(step(forward, module, hidden, grad)["router.tokens_per_expert"])
    assert torch.equal(*results)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_older_pytorch_is_named(fullgraph, monkeypatch):
    monkeypatch.setattr(router.router, "FIRST_TO_COMPILE", "9.0")
    layer, _ = twins()
    assert torch.isfinite(layer(inputs(6)[0])).all()
    expected = RuntimeError if fullgraph else ImportError
    with pytest.raises(expected, match=r"needs torch >= 9\.0 for|needs torch >= 9\.0, not .*: pip install -U torch"):
        torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(inputs(6)[0])
