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
    "expert choice": {"moe_router_type": "expert_choice"},
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


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_fsdp_changes_no_option_s_training(ep: int, tp: int) -> None:
    for found in run_ranks(option_worker, 4 if tp > 1 else 2, list(OPTIONS), ep, tp):
        assert "\n".join(found) == ""
