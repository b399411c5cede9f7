"""apply_fsdp: what it shards and how, what it leaves the same, mixed precision, models from the meta device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe import (
    MoEConfig,
    MoEGPT,
    MoELayer,
    ProcessGroups,
    apply_fsdp,
    clip_grad_norm,
    finalize_gradients,
    keep_quantized_weights,
    update_delayed_scales,
    update_expert_bias,
)
from moe.parallel import local_tensor, split_by_mesh
from tests.distributed.test_factorings import BIASED, CONFIG, global_batch, whole
from tests.moe.test_block import GroupOfTwo
from tests.ranks import run_ranks
from tests.tolerances import assert_close

FP8 = {"fp8": "hybrid", "hidden_size": 32, "moe_ffn_hidden_size": 32}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"moe_dispatch_num_chunks": 3},
    "deterministic": {"moe_deterministic": True},
    "recompute": {"moe_layer_recompute": True, "moe_dispatch_num_chunks": 2},
    "deduplicated": {"moe_token_dispatcher_type": "flex"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "latent": {"moe_latent_size": 8},
    "zero experts": {"moe_num_identity_experts": 2},
    "tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "delayed": {**FP8, "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    "mxfp8": {**FP8, "fp8_recipe": "mxfp8"},
    "expert choice": {
        "moe_router_type": "expert_choice",
        "moe_router_fusion": False,
        "moe_router_padding_for_quantization": False,
    },
}


def train(model: MoEGPT, groups: ProcessGroups, num_steps: int = 3) -> dict[str, Tensor]:
    """Train on two micro-batches a step; return gradients and weights, whole."""
    param_groups = [{"params": parameters} for parameters in split_by_mesh(model.parameters())]
    optimizer = torch.optim.AdamW(param_groups, lr=0.03)
    found, share = {}, 2 * groups.dp.size()
    for step in range(num_steps):
        model.zero_grad()
        tokens, labels, _ = global_batch(step)
        with keep_quantized_weights(model):
            for micro in range(2):
                part = micro * groups.dp.size() + groups.dp.rank()
                model(tokens.chunk(share)[part], labels.chunk(share)[part]).backward()
        finalize_gradients(model, groups, 2)
        found |= {f"step {step}: gradient of {name}": whole(p.grad) for name, p in model.named_parameters()}
        found[f"step {step}: norm"] = clip_grad_norm(model, 0.5, groups)
        optimizer.step()
        update_expert_bias(model, groups)
        update_delayed_scales(model)
    return found | {f"weight {name}": whole(p) for name, p in model.named_parameters()}


def make(groups: ProcessGroups, **changes: Any) -> MoEGPT:
    torch.manual_seed(5)
    return MoEGPT(replace(CONFIG, **changes), groups)


def option_worker(options: list[str], ep: int, tp: int) -> list[str]:
    """Return where training with FSDP differs from training without it."""
    groups, found = ProcessGroups.build(ep, tensor_model_parallel_size=tp), []
    for option in options:
        expected = train(make(groups, **OPTIONS[option]), groups)
        actual = train(apply_fsdp(make(groups, **OPTIONS[option]), groups), groups)
        for name, value in expected.items():
            try:
                assert_close(actual[name], value, what=name)
            except AssertionError as error:
                found.append(f"{option}: {error}")
    return found


@pytest.mark.parametrize(
    ("options", "world_size", "ep", "tp"),
    [(list(OPTIONS), 2, 1, 1), (list(OPTIONS)[:4], 2, 2, 1), (["recompute", "mxfp8"], 4, 1, 2)],
    ids=["ep 1", "ep 2", "tp 2"],
)
def test_fsdp_changes_no_option_s_training(options: list[str], world_size: int, ep: int, tp: int) -> None:
    for found in run_ranks(option_worker, world_size, options, ep, tp):
        assert "\n".join(found) == ""


def placements_worker() -> None:
    """Dense parameters are cut over all DP ranks, experts over EDP: along L, or along H where L is too short."""
    groups = ProcessGroups.build(1)
    few = apply_fsdp(make(groups, num_moe_experts=2, add_bias_linear=False), groups)  # L = 2 < 4 ranks, H = 20
    odd = apply_fsdp(make(groups, num_moe_experts=2, hidden_size=18), groups)  # 4 does not divide 18
    both = ProcessGroups.build(2, tensor_model_parallel_size=2)
    sharded = apply_fsdp(make(both), both)
    experts = few.layers[0].mlp.experts
    assert experts.linear_fc1.weight.placements == (Shard(3),)
    assert experts.linear_fc1.weight.to_local().shape == (2, 2, 12, 5)
    assert experts.linear_fc2.weight.placements == (Shard(1),)
    assert experts.linear_fc2.weight.to_local().shape == (2, 5, 12)
    assert odd.layers[0].mlp.experts.linear_fc2.weight.placements == (Shard(0),)
    assert len(odd.layers[0].mlp.experts.linear_fc2.weight.to_local()) == (1 if dist.get_rank() < 2 else 0)
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor), name
        is_over_tp = "linear_qkv" in name or "linear_proj" in name or name.startswith(("embedding", "output_layer"))
        dims = ("edp", "ep", "etp") if "experts.linear" in name and "shared" not in name else ("dp_cp",)
        assert parameter.device_mesh.mesh_dim_names == ((*dims, "tp") if is_over_tp else dims), name
    assert sharded.layers[0].self_attention.linear_proj.bias.placements == (Shard(0), Replicate())
    for module in (sharded, *sharded.layers, *(layer.experts for layer in sharded.moe_layers().values())):
        assert isinstance(module, FSDPModule)
    for model in (few, odd):
        expected = train(make(groups, **{name: getattr(model.config, name) for name in CHANGED}), groups)
        for name, value in train(model, groups).items():
            assert_close(value, expected[name], what=name)


CHANGED = ("num_moe_experts", "hidden_size", "add_bias_linear")


def test_what_is_cut_and_how() -> None:
    run_ranks(placements_worker, 4)


def meta_worker() -> None:
    """A model from the meta device has the same finite values on every factoring, and trains."""
    values = []
    for ep, tp in ((1, 1), (2, 1), (1, 2)):
        groups = ProcessGroups.build(ep, tensor_model_parallel_size=tp)
        with torch.device("meta"):
            model = MoEGPT(replace(CONFIG, moe_latent_size=8, **BIASED), groups)
        torch.manual_seed(5)
        apply_fsdp(model, groups)
        values.append({name: whole(p) for name, p in model.named_parameters()})
        train(model, groups, num_steps=1)
    for found in values:
        for name, value in found.items():
            assert value.isfinite().all(), name
            assert value.any() or name.endswith("bias"), name
            assert torch.equal(value, values[0][name]), name
    first, second = (values[0][f"layers.{index}.mlp.experts.linear_fc1.weight"] for index in (0, 2))
    assert not torch.equal(first, second)
    assert 0.3 < first.std() < 0.5  # init_method_std is 0.4
    assert 0.3 < values[0]["layers.1.self_attention.linear_qkv.weight"].std() < 0.5


def test_a_model_from_the_meta_device_gets_its_values() -> None:
    run_ranks(meta_worker, 2)


def precision_worker() -> dict[str, Any]:
    """bf16 compute over fp32 parameters: what experts see, what the optimizer steps, and in what sums are taken."""
    groups, seen = ProcessGroups.build(1), {}
    model = make(groups, params_dtype=torch.float32, moe_router_dtype="fp32", **BIASED)
    apply_fsdp(model, groups, param_dtype=torch.bfloat16)

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.update(tokens=args[0].tokens.dtype, probs=args[0].probs.dtype)
        seen["weight"] = local_tensor(module.linear_fc1.weight).dtype

    model.layers[0].mlp.experts.register_forward_pre_hook(look)
    tokens, labels, _ = global_batch(0)
    model(tokens, labels).backward()
    finalize_gradients(model, groups)
    seen["gradients"] = {p.grad.dtype for p in model.parameters()}
    seen["parameters"] = {p.dtype for p in model.parameters()}
    seen["expert_bias"] = model.layers[0].mlp.router.expert_bias.dtype
    # A gradient of 1 + 2^-9 on one rank and of 2^-9 on the other: their sum is lost where it is taken in bf16.
    layer = nn.Linear(1, 4, bias=False)
    nn.init.ones_(layer.weight)
    apply_fsdp(layer, groups, param_dtype=torch.bfloat16)
    values = [1.0, 2.0**-8] if dist.get_rank() == 0 else [2.0**-9, 2.0**-9]
    for value in values:
        layer(torch.full((1, 1), value)).sum().backward()
    seen["sum"] = whole(layer.weight.grad).flatten().tolist()
    return seen


def test_mixed_precision_keeps_probs_gradients_and_sums_in_fp32() -> None:
    for seen in run_ranks(precision_worker, 2):
        assert (seen["tokens"], seen["probs"], seen["weight"]) == (torch.bfloat16, torch.float32, torch.bfloat16)
        assert seen["gradients"] == seen["parameters"] == {torch.float32}
        assert seen["expert_bias"] == torch.float32
        assert seen["sum"] == [1 + 2.0**-8 + 2.0**-8] * 4


def early_worker() -> None:
    """When backward reaches block 1, the experts of block 2 have handed their gradients over and are cut again."""
    groups, seen = ProcessGroups.build(1), []
    model = apply_fsdp(make(groups), groups)
    experts = model.layers[2].mlp.experts

    def look(gradient: Tensor) -> None:
        weight = experts.linear_fc1.weight
        seen.append((weight.grad is not None, weight.device_mesh.mesh_dim_names))

    model.layers[1].register_forward_hook(lambda module, args, output: output.register_hook(look) and None)
    tokens, labels, _ = global_batch(0)
    model(tokens, labels).backward()
    assert seen == [(True, ("edp",))]


def test_experts_reduce_their_gradients_at_once() -> None:
    run_ranks(early_worker, 2)


def layer_worker() -> None:
    """A MoELayer alone: its gradients are those without FSDP."""
    config = MoEConfig(
        hidden_size=12, num_moe_experts=4, moe_ffn_hidden_size=8, params_dtype=torch.float64, moe_router_dtype="fp64",
        moe_shared_expert_intermediate_size=6,
    )  # fmt: skip
    groups, gradients = ProcessGroups.build(2), []
    for shards in (False, True):
        torch.manual_seed(1)
        layer = MoELayer(config, groups)
        if shards:
            apply_fsdp(layer, groups)
        torch.manual_seed(dist.get_rank())
        hidden = torch.randn(5 + dist.get_rank(), 2, 12, dtype=torch.float64, requires_grad=True)
        layer(hidden).square().sum().backward()
        finalize_gradients(layer, groups)
        gradients.append({name: whole(p.grad) for name, p in layer.named_parameters()} | {"hidden": hidden.grad})
    for name, value in gradients[0].items():
        assert_close(gradients[1][name], value, what=name)


def test_a_layer_alone() -> None:
    run_ranks(layer_worker, 4)


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"apply_fsdp needs torch.distributed: start with torchrun"):
        apply_fsdp(nn.Linear(2, 2), ProcessGroups.build())
    run_ranks(refusal_worker, 1)


def refusal_worker() -> None:
    groups = ProcessGroups.build()
    config = replace(
        CONFIG, params_dtype=torch.float32, moe_router_dtype="fp32", fp8_param=True, fp8_recipe="tensorwise", **FP8
    )
    with pytest.raises(ValueError, match=r"fp8_param \(True\) is not available with apply_fsdp"):
        apply_fsdp(MoEGPT(config, groups), groups)
    model = apply_fsdp(MoEGPT(CONFIG, groups), groups)
    other = MoEGPT(replace(CONFIG, moe_layer_freq=2), ProcessGroups.build())
    other.groups = replace(groups, ep=GroupOfTwo())
    for refused in (lambda: apply_fsdp(other, groups), lambda: finalize_gradients(other, groups)):
        with pytest.raises(
            ValueError, match=r"groups have ep size 1, and the model was built with groups of ep size 2"
        ):
            refused()
    with pytest.raises(ValueError, match=r"apply_fsdp was applied to this model or a part of it before"):
        apply_fsdp(model, groups)
