"""megatron-core's MoELayer with its TopKRouter, a dispatcher and SequentialMLP, in one process on the CPU.

The package asks for CUDA streams where it would copy counts to the host; stand-ins that do nothing answer. EP is 1.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Forward
from tests.parity.megatron import load

KINDS: dict[str, dict[str, Any]] = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "alltoall fused activation": {"moe_token_dispatcher_type": "alltoall", "bias_activation_fusion": True},
}
GROUPS = ("tp", "cp", "tp_cp", "tp_dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp", "expt_dp_gtp_remat")


class _Stream:
    """A stream or an event: whatever is done with it is done already."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "_Stream":
        return self


STREAM = _Stream()
ANSWERS: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "current_stream": lambda *_: STREAM,
    "stream": lambda _: contextlib.nullcontext(),
    "Stream": _Stream,
}


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let the package take the CPU for the current device and find streams without effect; takes microseconds."""
    kept = {name: getattr(torch.cuda, name) for name in ANSWERS}
    try:
        for name, answer in ANSWERS.items():
            setattr(torch.cuda, name, answer)
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.cuda, name, function)


def version() -> str:
    """Return the version of the package; ImportError if it is not there."""
    load("transformer.moe.moe_layer")
    return importlib.metadata.version("megatron-core")


def _groups() -> Any:
    """Return every group as that of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = load("process_groups_config").ProcessGroupCollection()
    for name in GROUPS:
        setattr(groups, name, dist.group.WORLD)
    state = load("parallel_state")
    state.destroy_global_memory_buffer()
    state._set_global_memory_buffer()  # into which the allgather dispatcher gathers
    return groups


def build(
    kind: str, hidden: int, ffn: int, experts: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, Forward]:
    """Return the layer and its forward function on [T, H].

    Args:
        kind: of KINDS.
        hidden, ffn, experts, topk, dtype: H, F, E, K and the dtype of the parameters; the router computes in fp32.
        seed: of the initial weights.
    """
    config = load("transformer.transformer_config").TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        moe_ffn_hidden_size=ffn,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **{"bias_activation_fusion": False, **KINDS[kind]},
    )
    make = load("models.gpt.moe_module_specs").get_moe_module_spec(use_te=False, num_experts=experts)
    with torch.random.fork_rng(devices=[]), without_cuda():
        torch.manual_seed(seed)
        module = make(config=config, pg_collection=_groups(), layer_number=1)

    def forward(hidden_states: Tensor) -> Tensor:
        with without_cuda():
            return module(hidden_states.unsqueeze(1))[0].squeeze(1)  # [T, H] -> [T, 1, H] -> [T, H]

    return module.train(), forward


@torch.no_grad()
def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy router.weight [E, H], fc1 [E, 2F, H] and fc2 [E, H, F] into `build`'s layer."""
    module.router.weight.copy_(weights["router.weight"])
    for expert, fc1, fc2 in zip(module.experts.local_experts, weights["fc1"], weights["fc2"], strict=True):
        expert.linear_fc1.weight.copy_(fc1)
        expert.linear_fc2.weight.copy_(fc2)
