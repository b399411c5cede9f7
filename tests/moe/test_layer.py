"""MoELayer against the reference with every option, its stages as parts, and what it keeps between calls."""

import copy
import gc
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from dispatchers.base import ExpertInput
from moe.config import MoEConfig
from moe.layer import MoELayer
from tests import reference
from tests.tolerances import assert_close

HIDDEN, EXPERTS, FFN, TOPK, BATCH = 12, 6, 7, 3, 2
FP64 = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
PADDED = {"moe_router_padding_for_quantization": True}


EXACT = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}


def build(seed: int = 0, **fields: object) -> MoELayer:
    torch.manual_seed(seed)
    defaults = {
        "hidden_size": HIDDEN,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": TOPK,
        "init_method_std": 0.4,
    }
    return MoELayer(MoEConfig(**{**defaults, **fields}))


def draw(num_positions: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_positions, BATCH, HIDDEN, dtype=dtype, generator=generator).requires_grad_()


def run(layer: nn.Module, hidden_states: Tensor) -> dict[str, Tensor]:
    """Output and every gradient for a fixed gradient of the output."""
    output = layer(hidden_states)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    grads = torch.autograd.grad((output * weight).sum(), [hidden_states, *parameters])
    return {"output": output.detach(), "hidden_states": grads[0], **dict(zip(names, grads[1:], strict=True))}


class ReferenceLayer(nn.Module):
    """The same parameters, computed by the reference."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        for name in ("router", "experts", "shared_experts", "fc1_latent_proj", "fc2_latent_proj"):
            setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens, act = hidden_states.flatten(0, 1), partial(reference.activation, "silu")
        fc1, fc2, shared = self.experts.linear_fc1, self.experts.linear_fc2, self.shared_experts
        probs, routing_map = reference.router(tokens, self.router.weight, TOPK)
        latent, out_of = tokens, None
        if isinstance(self.fc1_latent_proj, nn.Linear):
            latent, out_of = tokens @ self.fc1_latent_proj.weight.T, self.fc2_latent_proj.weight.T
        output = reference.experts(latent, probs, routing_map, fc1.weight, fc2.weight, act)
        output = output if out_of is None else output @ out_of
        if shared is not None:
            weights = shared.linear_fc1.weight, shared.linear_fc2.weight
            output = output + reference.shared_expert(tokens, *weights, act, shared.gate_weight)
        return output.view(hidden_states.shape)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("fusion", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(
    ("num_positions", "padding"),
    [(11, {}), (8, PADDED), (11, PADDED)],
    ids=["no padding", "map padding", "slot padding"],
)
@pytest.mark.parametrize("latent", [None, 5])
@pytest.mark.parametrize("shared", ["none", "shared", "gated"])
def test_equals_the_reference(
    shared: str, latent: int | None, num_positions: int, padding: dict, fusion: bool, recompute: bool
) -> None:
    layer = build(
        moe_shared_expert_intermediate_size=None if shared == "none" else 9,
        moe_shared_expert_gate=shared == "gated",
        moe_latent_size=latent,
        moe_router_fusion=fusion,
        moe_layer_recompute=recompute,
        **padding,
        **FP64,
    )
    actual = run(layer, draw(num_positions))
    for name, expected in run(ReferenceLayer(layer), draw(num_positions)).items():
        assert_close(actual[name], expected, what=name)


@pytest.mark.parametrize("padding", [{}, PADDED], ids=["no padding", "padding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["moe_router_fusion", "moe_layer_recompute", "moe_recompute"])
def test_fusion_and_recompute_change_no_bit(option: str, dtype: torch.dtype, padding: dict) -> None:
    fields = {"params_dtype": dtype, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01, **padding}
    on_value = "mlp" if option == "moe_recompute" else True
    off, on = (run(build(**fields, **given), draw(8, dtype)) for given in ({}, {option: on_value}))
    for name in off:
        if option == "moe_router_fusion" and name in ("router.weight", "hidden_states"):
            assert_close(on[name], off[name], what=name)  # the fused backward has its own order of roundings
        else:
            assert torch.equal(on[name], off[name]), name


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_positions", [8, 11])
def test_counters_advance_once_by_the_unpadded_map(num_positions: int, recompute: bool) -> None:
    layer = build(moe_layer_recompute=recompute, moe_router_fusion=True, **PADDED, **FP64)
    hidden_states, slots = draw(num_positions), []
    layer.experts.register_forward_pre_hook(lambda module, args: slots.extend(args[0].tokens_per_expert_list))
    routed = reference.router(hidden_states.flatten(0, 1), layer.router.weight, TOPK)[1].sum(0)
    for _ in range(2):
        layer(hidden_states).sum().backward()
    with torch.no_grad():
        layer(hidden_states)
    layer.eval()(hidden_states)
    assert layer.router.tokens_per_expert.tolist() == (2 * routed).tolist()
    assert slots[:EXPERTS] == [-(-count // 16) * 16 for count in routed.tolist()]


@pytest.mark.parametrize("recompute", [False, True])
def test_zero_tokens_leave_dense_zero_gradients(recompute: bool) -> None:
    layer = build(moe_layer_recompute=recompute, moe_shared_expert_intermediate_size=9, moe_latent_size=5, **PADDED)
    hidden_states = draw(0, torch.float32)
    output = layer(hidden_states)
    assert output.shape == (0, BATCH, HIDDEN)
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_the_stages_read_their_arguments_alone() -> None:
    layer = build(moe_router_fusion=True, **PADDED, **FP64)
    seen = {}
    layer.router.register_forward_hook(lambda module, args, result: seen.update(probs=result[0], routing_map=result[1]))
    hidden_states = draw(8)
    versions = {}
    layer.routing_map_padding.register_forward_pre_hook(
        lambda *_: versions.update({name: (t._version, t.data_ptr(), t.detach().clone()) for name, t in seen.items()})
    )
    before = hidden_states.detach().clone(), hidden_states._version
    layer(hidden_states).sum().backward()
    assert hidden_states._version == before[1]
    assert torch.equal(hidden_states, before[0])
    for name, (version, pointer, values) in versions.items():
        assert (seen[name]._version, seen[name].data_ptr()) == (version, pointer), name
        assert torch.equal(seen[name], values), name


class SumOfProbs(nn.Module):
    """Experts by the contract alone: each slot gives prob times its row."""

    def forward(self, expert_input: ExpertInput) -> Tensor:
        real = expert_input.row_ids >= 0
        rows = expert_input.row_ids[real]
        addend = expert_input.tokens[rows] * expert_input.probs[real].unsqueeze(-1)
        return torch.zeros_like(expert_input.tokens).index_add(0, rows, addend)


class FixedRouter(nn.Module):
    """Token t goes to expert t modulo E with weight 2."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_states.shape[:-1].numel()
        routing_map = torch.eye(EXPERTS, dtype=torch.bool)[torch.arange(num_tokens) % EXPERTS]
        return routing_map * 2.0, routing_map


@pytest.mark.parametrize("num_positions", [8, 11])
def test_stages_can_be_replaced(num_positions: int) -> None:
    layer, hidden_states = build(**PADDED, **FP64), draw(num_positions)
    layer.experts = SumOfProbs()
    assert_close(layer(hidden_states), hidden_states)  # probs of a token sum to 1
    layer.router = FixedRouter()
    assert_close(layer(hidden_states), 2 * hidden_states)
    layer.shared_experts = nn.Identity()
    assert_close(layer(hidden_states), 3 * hidden_states)
    layer.routing_map_padding = nn.Identity()
    assert_close(layer(hidden_states), 3 * hidden_states)
    assert "top-3" in layer.describe()


def test_hooks_fire_once_a_forward() -> None:
    layer = build(moe_shared_expert_intermediate_size=9)
    calls: Counter[str] = Counter()
    stages = ("router", "routing_map_padding", "experts", "shared_experts")
    for name in stages:
        getattr(layer, name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    layer(draw(4, torch.float32)).sum().backward()
    assert calls == dict.fromkeys(stages, 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_deep_copy_is_independent_and_equal(recompute: bool) -> None:
    layer = build(moe_layer_recompute=recompute, **FP64)
    twin = copy.deepcopy(layer)
    for name, values in run(layer, draw(5)).items():
        assert torch.equal(run(twin, draw(5))[name], values), name
    expected = run(layer, draw(5))["output"]
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(run(layer, draw(5))["output"], expected)


def test_state_dict_has_the_public_names_and_loads_strictly() -> None:
    fields = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": True}
    layer = build(moe_latent_size=5, **fields)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "router.weight": (EXPERTS, HIDDEN),
        "router.bias": (EXPERTS,),
        "experts.linear_fc1.weight": (EXPERTS, 2, FFN, 5),
        "experts.linear_fc1.bias": (EXPERTS, 2, FFN),
        "experts.linear_fc2.weight": (EXPERTS, 5, FFN),
        "experts.linear_fc2.bias": (EXPERTS, 5),
        "shared_experts.linear_fc1.weight": (2, 9, HIDDEN),
        "shared_experts.linear_fc1.bias": (2, 9),
        "shared_experts.linear_fc2.weight": (HIDDEN, 9),
        "shared_experts.linear_fc2.bias": (HIDDEN,),
        "shared_experts.gate_weight": (1, HIDDEN),
        "fc1_latent_proj.weight": (5, HIDDEN),
        "fc2_latent_proj.weight": (HIDDEN, 5),
    }
    other = build(seed=1, moe_latent_size=5, **fields)
    hidden_states = draw(4, torch.float32)
    assert not torch.allclose(other(hidden_states), layer(hidden_states))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(hidden_states), layer(hidden_states))
    with pytest.raises(RuntimeError, match="gate_weight"):
        build(moe_latent_size=5, **{**fields, "moe_shared_expert_gate": False}).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("num_positions", [8, 11])
@pytest.mark.parametrize("padding", [{}, PADDED], ids=["no padding", "padding"])
def test_saved_bytes(fusion: bool, num_positions: int, padding: dict) -> None:
    """The experts' T H size + M G F size + 12 M, the dispatcher's 8 M' and the router's small ones.

    size is 4 bytes (fp32); M' counts the slots before slot padding, which adds 12 M' for their new places. The fused
    router keeps the map (T E) and the chosen logits (4 T K); unfused, dense values (4 T E), weights and ids (12 T K).
    """
    layer, hidden_states = build(moe_router_fusion=fusion, **padding), draw(num_positions, torch.float32)
    inputs: list[ExpertInput] = []
    layer.experts.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden_states)
    actual = sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in parameters)
    tokens, slots = hidden_states[..., 0].numel(), inputs[0].row_ids.numel()
    real_slots = int((inputs[0].row_ids >= 0).sum())
    experts = 4 * tokens * HIDDEN + slots * (2 * FFN * 4 + 12)
    dispatcher = real_slots * (8 + 12 if inputs[0].has_padding else 8)
    router = tokens * (EXPERTS + 4 * TOPK) if fusion else tokens * (4 * EXPERTS + 12 * TOPK)
    assert actual <= experts + dispatcher + router


def live_tensors() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their distinct storages."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_after_step_20_equals_step_3(recompute: bool) -> None:
    layer = build(moe_layer_recompute=recompute, moe_router_fusion=True, moe_aux_loss_coeff=0.1, **PADDED)
    optimizer, live = torch.optim.AdamW(layer.parameters()), {}
    for step in range(1, 21):
        layer(draw(8, torch.float32, seed=step)).square().mean().backward()
        optimizer.step()
        if step in (3, 20):
            live[step] = live_tensors()
    assert live[20] == live[3]


@pytest.mark.parametrize("recompute", [False, True])
def test_forwards_without_backward_leave_nothing(recompute: bool) -> None:
    layer, hidden_states = build(moe_layer_recompute=recompute, moe_aux_loss_coeff=0.1), draw(4, torch.float32)
    counts = []
    for _ in range(2):
        for _ in range(50):
            layer(hidden_states)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert abs(counts[1] - counts[0]) < 20


@pytest.mark.parametrize("recompute", [False, True])
def test_two_layers_interleaved_equal_separate_runs(recompute: bool) -> None:
    def layer(seed: int) -> MoELayer:
        return build(seed, moe_layer_recompute=recompute, moe_router_fusion=True, moe_aux_loss_coeff=0.1, **FP64)

    separate = [run(layer(seed), draw(5 + seed)) for seed in (1, 2)]
    layers, inputs = [layer(1), layer(2)], [draw(6), draw(7)]
    outputs = [module(hidden) for module, hidden in zip(layers, inputs, strict=True)]
    for output in reversed(outputs):  # both in flight; the first one's backward runs last
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        (output * weight).sum().backward()
    for module, hidden, output, expected in zip(layers, inputs, outputs, separate, strict=True):
        actual = {"output": output, "hidden_states": hidden.grad, **{n: p.grad for n, p in module.named_parameters()}}
        for name in expected:
            assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("recompute", [False, True])
def test_two_micro_batches_in_flight_equal_separate_ones(recompute: bool) -> None:
    layer = build(moe_layer_recompute=recompute, moe_router_fusion=True, **PADDED, **FP64)
    separate = [run(layer, draw(num_positions)) for num_positions in (5, 8)]
    inputs = [draw(5), draw(8)]
    outputs = [layer(hidden) for hidden in inputs]
    for hidden, output, expected in reversed(list(zip(inputs, outputs, separate, strict=True))):
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        actual = torch.autograd.grad((output * weight).sum(), [hidden, *layer.parameters()])
        for (name, values), grad in zip(list(expected.items())[1:], actual, strict=True):
            assert torch.equal(grad, values), name


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({}, ["top-3", "fusion=False", "padding     off", "latent      off", "shared      none", "recompute   off"]),
        ({"moe_router_fusion": True, "moe_aux_loss_coeff": 0.25}, ["fusion=torch", "aux loss 0.25"]),
        ({**PADDED, "fp8_recipe": "mxfp8"}, ["padding     to 32 (mxfp8)", "pad_multiple=32"]),
        ({"params_dtype": torch.float64}, ["parameters torch.float64, GEMMs torch.float64 by torch.mm"]),
        ({"moe_shared_expert_intermediate_size": 9}, ["shared      width 9, gate False"]),
        ({"moe_latent_size": 5, "moe_layer_recompute": True}, ["latent      5", "dispatch, experts, combine"]),
        ({"moe_recompute": "mlp"}, ["recompute   the experts' first GEMM"]),
        ({"activation_func": "quick_gelu"}, ["name='quick_gelu'", "alltoall, ep=1, etp=1"]),
    ],
)
def test_describe_names_the_choices_in_use(fields: dict, lines: list[str]) -> None:
    text = build(**fields).describe()
    for line in lines:
        assert line in text
    config = replace(build(**fields).config)
    assert MoELayer(config, layer_number=4).describe().startswith("MoELayer 4: hidden 12, 6 experts of width 7")


def test_autocast_does_not_reach_inside() -> None:
    fields = {
        "moe_shared_expert_intermediate_size": 5,
        "moe_shared_expert_gate": True,
        "moe_latent_size": 8,
        "add_bias_linear": True,
    }
    expected = build(**fields)(draw(4, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = build(**fields)(draw(4, torch.float32))
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "fields", [{}, {"moe_layer_recompute": True, "moe_router_fusion": True}, {"moe_latent_size": 5}], ids=str
)
def test_padding_tokens_reach_nothing_whatever_they_hold(fields: dict) -> None:
    """The rest comes out as it does alone, in values and gradients; padding comes out as 0."""
    options = {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": True}
    layer = build(**EXACT, **options, **fields, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    hidden_states = draw(7).detach()
    padding = torch.rand(7, BATCH, generator=torch.Generator().manual_seed(1)) < 0.4
    spoilt = hidden_states.masked_fill(padding.unsqueeze(-1), torch.nan).requires_grad_()
    output = layer(spoilt, padding)
    upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    output.backward(upstream)
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    alone = hidden_states[~padding].unsqueeze(1).requires_grad_()
    expected = layer(alone)
    expected.backward(upstream[~padding].unsqueeze(1))
    assert not output[padding].any()
    assert_close(output[~padding], expected.squeeze(1))
    assert not spoilt.grad[padding].any()
    assert_close(spoilt.grad[~padding], alone.grad.squeeze(1))
    for name, parameter in layer.named_parameters():
        assert_close(gradients[name], parameter.grad, what=name)


@pytest.mark.parametrize("pad", [False, True])
def test_dropped_tokens_keep_the_shared_expert(pad: bool) -> None:
    limits = {"moe_expert_capacity_factor": 0.1, "moe_pad_expert_input_to_capacity": pad}
    layer = build(**EXACT, **limits, moe_shared_expert_intermediate_size=9)
    hidden_states = draw(7)
    _, routing_map = layer.router(hidden_states)
    probs, _ = layer.router(hidden_states)
    dropped = (probs == 0).all(1).view(7, BATCH)
    assert 0 < dropped.sum() < dropped.numel()
    output, shared = layer(hidden_states), layer.shared_experts(hidden_states)
    assert_close(output[dropped], shared[dropped])
    assert (output[~dropped] - shared[~dropped]).abs().amax(-1).min() > 1e-6
    assert routing_map.sum(0).max() <= 2  # ceil(21 * 3 / 6 * 0.1)
