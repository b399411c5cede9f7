"""Memory formulas beside what models really hold: parameters, optimizer state, and what a forward saves."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import MasterWeights, MoEGPT, ProcessGroups, TransformerConfig, apply_fsdp, recompute
from moe.layout import Batch, Layout, expert_load, faults
from moe.memory import (
    bucket_bytes,
    gathered_bytes,
    gradient_bytes,
    memory_of,
    optimizer_bytes,
    parameter_bytes,
    weights_of,
)
from moe.parallel import local_tensor
from moe.saved_bytes import saved_bytes
from tests.ranks import run_ranks

CPU = torch.device("cpu")
BASE = TransformerConfig(
    hidden_size=48,
    num_moe_experts=8,
    moe_ffn_hidden_size=40,
    moe_router_topk=2,
    num_layers=3,
    num_attention_heads=6,
    vocab_size=72,
)
MIXED = {
    "moe_layer_freq": (0, 1, 1),
    "ffn_hidden_size": 56,
    "num_query_groups": 2,
    "add_bias_linear": True,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
}
FP8 = {"fp8": "hybrid", "hidden_size": 48, "moe_ffn_hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": MIXED,
    "latent": {"moe_latent_size": 16, "kv_channels": 4},
    "ungated": {"gated_linear_unit": False, "activation_func": "gelu"},
    "constant experts": {"moe_num_constant_experts": 2, "moe_num_null_experts": 1},
    "bf16": {"params_dtype": torch.bfloat16},
    "fp8 weights": {**FP8, "fp8_recipe": "tensorwise", "fp8_param": True},
}


def held(parameter: Tensor) -> int:
    """Return the bytes of this rank's part of a parameter or of a tensor beside it."""
    return local_tensor(parameter).nbytes


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_one_rank(name: str) -> None:
    config = replace(BASE, **MODELS[name])
    with torch.device("meta"):
        model = MoEGPT(config)
    scales = sum(buffer.nbytes for key, buffer in model.named_buffers() if key.endswith("weight_scale"))
    assert (
        parameter_bytes(weights_of(config, Layout(world_size=1)), Layout(world_size=1))
        == sum(map(held, model.parameters())) + scales
    )


def hold(config: TransformerConfig, sizes: dict[str, int], *, fsdp: bool) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and AdamW's moments that this rank holds after a step."""
    groups = ProcessGroups.build(**sizes)
    model = MoEGPT(config, groups)
    if fsdp:
        apply_fsdp(model, groups)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(config.vocab_size, (2, 12))
    model(tokens, tokens).backward()
    gradients = sum(held(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    optimizer.step()
    state = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return sum(map(held, model.parameters())), gradients, sum(map(held, state))


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize(
    "layout",
    [Layout(world_size=4, ep=2, etp=2), Layout(world_size=4, ep=2, tp=2), Layout(world_size=4, etp=2)],
    ids=["ep2 etp2", "tp2 ep2", "etp2"],
)
def test_parameters_gradients_and_moments_of_four_ranks(layout: Layout, fsdp: bool) -> None:
    config = replace(BASE, **MIXED, params_dtype=torch.bfloat16, sequence_parallel=True)
    layout = replace(layout, fsdp=fsdp)
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    found = run_ranks(_hold_on_a_rank, layout.world_size, config, sizes, fsdp)
    expected = (
        parameter_bytes(weights_of(config, layout), layout),
        gradient_bytes(weights_of(config, layout), layout),
        optimizer_bytes(weights_of(config, layout), layout),
    )
    assert max(found) == expected  # dimensions that ranks do not divide leave less on the last ones
    assert found[0] == expected


def _hold_on_a_rank(config: TransformerConfig, sizes: dict[str, int], fsdp: bool) -> tuple[int, int, int]:
    return hold(config, sizes, fsdp=fsdp)


def test_experts_are_cut_along_h_where_there_are_too_few() -> None:
    layout = Layout(world_size=16, fsdp=True)
    weights = [weight for weight in weights_of(BASE, layout) if weight.unit == "experts"]
    assert [weight.num_kept(layout) for weight in weights] == [8 * 2 * 40 * 48 // 16, 8 * 48 * 40 // 16]
    assert gathered_bytes(BASE, replace(layout, fsdp=False)) == 0
    root = 4 * (2 * 72 * 48 + 48)
    block = 4 * (2 * 48 + 3 * 48 * 48 + 48 * 48 + 8 * 48)
    experts = 4 * 8 * 3 * 40 * 48
    assert gathered_bytes(BASE, layout) == root + 3 * (block + experts) + experts


def test_state_of_fp8_weights() -> None:
    config = replace(BASE, **MODELS["fp8 weights"])
    model = MoEGPT(config)
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.of(model.parameters()))
    masters.attach(optimizer)
    tokens = torch.randint(config.vocab_size, (2, 12))
    model(tokens, tokens).backward()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    optimizer.step()
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    kept = sum(master.nbytes for master in masters.masters.values())
    layout = Layout(world_size=1)
    assert gradient_bytes(weights_of(config, layout), layout) == gradients
    assert optimizer_bytes(weights_of(config, layout), layout) == moments + kept
    assert optimizer_bytes(weights_of(config, layout), layout, 6.0) == 6 * sum(
        weight.numel for weight in weights_of(config, layout)
    )


class Recomputed(nn.Module):
    """A block that runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        return recompute(self.block, hidden_states)


def measured_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes of the distinct storages that a forward saves for backward, parameters apart."""
    known = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = getattr(tensor, "_local_tensor", tensor)
        local = local.wait() if hasattr(local, "trigger_wait") else local
        storage = local.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage  # holds it, so that its address is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in storages.values())


def saved_by(config: TransformerConfig, batch: Batch, mode: str, groups: ProcessGroups | None = None) -> int:
    """Return what a forward of the model really saves."""
    torch.manual_seed(5)
    again = {"mlp": {"moe_recompute": "mlp"}, "layer": {"moe_layer_recompute": True}}.get(mode, {})
    model = MoEGPT(replace(config, **again), groups)
    if mode == "block":
        model.layers = nn.ModuleList(Recomputed(block) for block in model.layers)
    tokens = torch.randint(config.vocab_size, (batch.micro_batch_size, batch.seq_length))
    return measured_bytes(model, lambda: model(tokens, tokens))


BF16 = {"params_dtype": torch.bfloat16}
SIGMOID = {"moe_router_score_function": "sigmoid"}
AUX = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
ONE = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ALL = {"moe_router_topk": 8}
CASES: list[tuple[str, dict[str, Any], str, tuple[int, int]]] = [
    ("fp32", {}, "none", (24, 2)),
    ("bf16", BF16, "none", (24, 2)),
    ("fp64", {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}, "none", (12, 2)),
    ("mixed", MIXED, "none", (16, 3)),
    ("mixed, bf16", {**MIXED, **BF16}, "none", (40, 1)),
    ("top-1", {**ONE, **BF16}, "none", (32, 2)),
    ("top-8", {**ALL, **BF16}, "none", (20, 2)),
    ("top-8 of 32, fused", {**ALL, "num_moe_experts": 32, "moe_router_fusion": True, **AUX}, "none", (20, 2)),
    ("ungated", {"gated_linear_unit": False, "moe_ffn_hidden_size": 120}, "none", (24, 2)),
    ("wide experts", {"moe_ffn_hidden_size": 200, **BF16}, "none", (24, 2)),
    ("wide model", {"hidden_size": 192, "num_query_groups": 3, **BF16}, "none", (24, 2)),
    ("long sequence", {"num_layers": 1}, "none", (128, 1)),
    ("large vocabulary", {"vocab_size": 1000, **BF16}, "none", (24, 2)),
    ("latent", {"moe_latent_size": 24, "moe_ffn_hidden_size": 96}, "none", (24, 2)),
    ("sigmoid", {**SIGMOID, **AUX, "num_moe_experts": 64}, "none", (24, 2)),
    ("sigmoid, fused", {**SIGMOID, **AUX, "num_moe_experts": 64, "moe_router_fusion": True}, "none", (24, 2)),
    ("sqrtsoftplus", {"moe_router_score_function": "sqrtsoftplus", "num_moe_experts": 64, **AUX}, "none", (24, 2)),
    ("pre-softmax", {"moe_router_pre_softmax": True, "num_moe_experts": 64, **AUX}, "none", (24, 2)),
    ("mlp", {**MIXED, **BF16}, "mlp", (24, 2)),
    ("mlp, from the config", {**BF16, "moe_recompute": "mlp"}, "none", (24, 2)),
    ("mlp, mxfp8", {**FP8, **BF16, **ONE, "hidden_size": 96, "fp8_recipe": "mxfp8"}, "mlp", (256, 2)),
    ("layer", {**MIXED, **BF16}, "layer", (24, 2)),
    ("layer, top-8", {**ALL, "moe_ffn_hidden_size": 160}, "layer", (24, 2)),
    ("block", {**MIXED, **BF16}, "block", (24, 2)),
    ("block, one layer", {"num_layers": 1, "vocab_size": 8}, "block", (24, 2)),
    ("FP8 store", {**BF16, "moe_ffn_hidden_size": 256, "activation_func_fp8_input_store": True}, "none", (24, 2)),
    ("tensorwise", {**FP8, **BF16, **ALL, "fp8_recipe": "tensorwise"}, "none", (64, 2)),
    ("mxfp8", {**FP8, **BF16, **ONE, "hidden_size": 96, "fp8_recipe": "mxfp8"}, "none", (256, 2)),
]


# The hooks do not see the routing that `recompute` keeps; padding is assumed to add half a multiple to every expert.
TOLERANCES = {"block": 0.03, "block, one layer": 0.03, "tensorwise": 0.05}


@pytest.mark.parametrize(("name", "overrides", "mode", "sizes"), CASES, ids=[case[0] for case in CASES])
def test_saved_bytes_of_a_forward(name: str, overrides: dict[str, Any], mode: Any, sizes: tuple[int, int]) -> None:
    config, batch = replace(BASE, **overrides), Batch(seq_length=sizes[0], micro_batch_size=sizes[1])
    formula = saved_bytes(config, Layout(world_size=1), batch, mode, device=CPU)
    assert formula == pytest.approx(saved_by(config, batch, mode), rel=TOLERANCES.get(name, 0.002))


def _saved_on_a_rank(config: TransformerConfig, batch: Batch, sizes: dict[str, int], mode: str) -> int:
    return saved_by(config, batch, mode, ProcessGroups.build(**sizes))


EVEN = {"moe_router_force_load_balancing": "balanced"}
CAPACITY = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.parametrize(
    ("layout", "overrides", "mode", "length", "tolerance"),
    [
        (Layout(world_size=4, ep=2, etp=2), EVEN, "none", 32, 0.003),
        (Layout(world_size=4, ep=4), {"moe_token_dispatcher_type": "deduplicated"}, "none", 64, 0.02),
        (Layout(world_size=2, ep=2), {"moe_token_dispatcher_type": "allgather", **EVEN}, "none", 32, 0.002),
        (Layout(world_size=2, tp=2), EVEN, "none", 32, 0.002),
        (Layout(world_size=2, tp=2, ep=2), EVEN, "layer", 32, 0.002),
        (Layout(world_size=2, ep=2), CAPACITY, "none", 32, 0.02),
        (Layout(world_size=2, ep=2), {**FP8, **EVEN, "hidden_size": 96, "fp8_recipe": "mxfp8"}, "none", 248, 0.03),
    ],
    ids=["ep2 etp2", "deduplicated", "allgather", "tp2", "tp2 ep2 layer", "capacity", "mxfp8"],
)
def test_saved_bytes_over_ranks(
    layout: Layout, overrides: dict[str, Any], mode: Any, length: int, tolerance: float
) -> None:
    config = replace(BASE, **MIXED, **BF16, **overrides, sequence_parallel=True)
    batch = Batch(seq_length=length, micro_batch_size=2)
    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    found = run_ranks(_saved_on_a_rank, layout.world_size, config, batch, sizes, mode)
    mean = sum(found) / len(found)  # where routing is not even, some ranks hold more slots than others
    assert saved_bytes(config, layout, batch, mode, device=CPU) == pytest.approx(mean, rel=tolerance)


def _bytes_of_an_operator(run: Callable[..., Any], *args: Tensor) -> int:
    """Return the bytes that an operator saves on the meta device, where storages have no address."""
    sizes: dict[int, tuple[Any, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(*args)
    return sum(size for _, size in sizes.values())


def test_a_fused_norm_saves_its_input_and_the_reciprocal_roots() -> None:
    """On a GPU torch has a fused kernel, whose backward takes these; it cannot run here. The rest is the same."""
    schema = torch.ops.aten._fused_rms_norm_backward.default._schema
    tensors = [argument.name for argument in schema.arguments if "Tensor" in str(argument.type)]
    assert tensors == ["grad_out", "input", "rstd", "weight"]
    batch, one = Batch(seq_length=24, micro_batch_size=2), Layout(world_size=1)
    of_cpu, of_gpu = 24 * 2 * (2 * 48 * 4 + 4), 24 * 2 * (48 * 2 + 4)
    config = replace(BASE, **BF16)
    difference = saved_bytes(config, one, batch, device=CPU) - saved_bytes(config, one, batch)
    assert difference == (2 * config.num_layers + 1) * (of_cpu - of_gpu)


def test_flash_attention_saves_its_operands_result_and_log_sums() -> None:
    query = torch.empty(2, 6, 24, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty(2, 2, 24, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    kept = _bytes_of_an_operator(lambda q, k, v: flash(q, k, v, 0.0, True), query, key, value)
    values = 2 * 24 * 8 * (6 + 2 + 2 + 6) * 2
    log_sums = 2 * 24 * 6 * 4
    assert values + log_sums <= kept <= values + log_sums + 64  # the state of a random generator


def test_the_worst_load_is_all_tokens_on_one_rank() -> None:
    config, layout = replace(BASE, moe_router_topk=3), Layout(world_size=8, ep=4, etp=2)
    batch = Batch(seq_length=10, micro_batch_size=2)
    even, worst = expert_load(config, layout, batch), expert_load(config, layout, replace(batch, imbalance=math.inf))
    assert (even.rows, even.slots, even.rows_sent) == (2 * 20 * 3, 2 * 20 * 3, 20 * 3)
    assert (worst.rows, worst.slots) == (8 * 20 * 2, 8 * 20 * 2)  # two experts live here
    gathered = expert_load(replace(config, moe_token_dispatcher_type="allgather"), layout, batch)
    assert (gathered.rows, gathered.slots) == (8 * 20, 2 * 20 * 3)
    once = replace(config, moe_token_dispatcher_type="deduplicated")
    assert expert_load(once, layout, replace(batch, imbalance=math.inf)).rows == 8 * 20
    limited = replace(config, moe_expert_capacity_factor=1.0)  # C = ceil(20 * 3 / 8) = 8
    assert expert_load(limited, layout, replace(batch, imbalance=math.inf)).slots == 8 * 2 * 8
    padded = replace(config, moe_router_padding_for_quantization=True, fp8_recipe="mxfp8")  # 2 experts, 60 slots each
    assert expert_load(padded, layout, batch).slots == 2 * (60 + 31 / 2)
    assert memory_of(config, layout, replace(batch, imbalance=math.inf)).total > memory_of(config, layout, batch).total


def test_a_bucket_ends_with_the_parameter_that_filled_it() -> None:
    config = replace(BASE, hidden_size=4096, num_attention_heads=32, vocab_size=32000, params_dtype=torch.bfloat16)
    one, two = Layout(world_size=1), Layout(world_size=2)
    values = (1 << 24) + 32000 * 4096
    assert bucket_bytes(weights_of(config, two), two, 4) == 2 * 4 * values  # the parts in fp32, and they joined
    assert bucket_bytes(weights_of(config, one), one, 4) == 0


@pytest.mark.parametrize(
    ("overrides", "sizes", "text"),
    [
        ({}, {"ep": 3}, "num_moe_experts (8) is not divisible by EP (3)"),
        ({}, {"tp": 4}, "num_attention_heads (6) is not divisible by TP (4)"),
        ({"num_query_groups": 2}, {"tp": 6}, "num_query_groups (2) is not divisible by TP (6)"),
        ({"vocab_size": 71}, {"tp": 2}, "vocab_size (71) is not divisible by TP (2)"),
        ({}, {"tp": 3}, "seq_length (32) is not divisible by TP (3)"),
        ({}, {"etp": 16}, "moe_ffn_hidden_size (40) is not divisible by ETP (16)"),
        ({}, {"ep": 8, "etp": 8}, "world_size (48) is not divisible by EP x ETP (64)"),
        ({**FP8, "fp8_recipe": "mxfp8", "hidden_size": 96}, {"etp": 4}, "moe_ffn_hidden_size (64) / ETP (4) (16)"),
        (MODELS["fp8 weights"], {"etp": 2}, "needs ETP 1, not 2"),
        (MODELS["fp8 weights"], {"fsdp": True}, "apply_fsdp does not take fp8_param"),
        (
            {"moe_token_dispatcher_type": "deduplicated", "moe_dispatch_node_size": 8},
            {"ep": 4},
            "moe_dispatch_node_size (8) must divide EP x ETP (4)",
        ),
    ],
)
def test_layouts_that_cannot_run_say_why(overrides: dict[str, Any], sizes: dict[str, Any], text: str) -> None:
    config, batch = replace(BASE, **overrides), Batch(seq_length=32, micro_batch_size=2)
    assert any(text in fault for fault in faults(config, Layout(world_size=48, **sizes), batch))
    assert faults(BASE, Layout(world_size=48, ep=8, etp=2, tp=2), batch) == []
