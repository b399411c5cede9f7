"""MoE layers on real ranks: this library's and megatron-core's, on the same weights and tokens, timed in turns."""

import contextlib
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.layer import DTYPES, SHAPES, Shape, make_weights
from moe import MoEConfig, MoELayer
from moe.parallel import ProcessGroups, local_tensor

OURS = ("alltoall", "deduplicated")
PEER = "megatron-core alltoall"
# Of the largest value. Sums over experts run in fp32 here; there they are rounded to bf16 after each addend.
TOLERANCES = {"fp32": 1e-5, "bf16": 2.0**-5}
Layer = tuple[nn.Module, Callable[[Tensor], Tensor]]  # the module, and [T, H] -> [T, H]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: a shape of `SHAPES` in a dtype of `DTYPES`, tokens T on every rank.

    Attributes:
        shape, dtype: their names.
        rounds: timed rounds, after one that warms up.
        seed: of weights (the same on every rank) and tokens (each rank its own).
        peer: whether megatron-core takes part.
    """

    shape: str
    dtype: str
    rounds: int
    seed: int = 0
    peer: bool = True


def our_layer(name: str, shape: Shape, dtype: torch.dtype, weights: dict[str, Tensor], groups: ProcessGroups) -> Layer:
    """Return this library's layer with dispatcher `name`: softmax over the selected logits, SwiGLU, no bias."""
    config = MoEConfig(
        hidden_size=shape.hidden,
        num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.ffn,
        moe_router_topk=shape.topk,
        moe_token_dispatcher_type=name,
        moe_router_fusion=True,
        params_dtype=dtype,
    )
    layer = MoELayer(config, groups)
    first = layer.experts.first_expert
    here = slice(first, first + layer.experts.num_local_experts)
    with torch.no_grad():
        layer.router.weight.copy_(weights["router.weight"])
        for linear, weight in ((layer.experts.linear_fc1, weights["fc1"]), (layer.experts.linear_fc2, weights["fc2"])):
            local = local_tensor(linear.weight)  # fc1: [L, 2, F, H], fc2: [L, H, F]
            local.copy_(weight[here].reshape(local.shape))

    def forward(tokens: Tensor) -> Tensor:
        return layer(tokens.unsqueeze(1)).squeeze(1)  # [T, H] -> [T, 1, H] -> [T, H]

    return layer, forward


class _Stream:
    """Stands for a CUDA stream or event: on the CPU everything is in order as it is."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, *args: object) -> "_Stream":
        return self

    def wait_event(self, *args: object) -> None:
        pass

    wait_stream = record = wait = synchronize = wait_event


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let megatron-core's layer run on the CPU: plain functions in place of five of torch.cuda, which cost no time.

    Its splits for all-to-all stay tensors there, while torch.distributed takes lists.
    """
    from tests.parity.megatron import load

    dispatchers = load("transformer.moe.token_dispatcher")
    replaced = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Stream,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(dispatchers, "all_to_all", _with_lists(dispatchers.all_to_all)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _with_lists(all_to_all: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return their all_to_all with splits turned into lists."""

    def wrapped(group: Any, rows: Tensor, output: Any = None, input: Any = None, use_nccl_stream: bool = False) -> Any:
        lists = [splits.tolist() if isinstance(splits, Tensor) else splits for splits in (output, input)]
        return all_to_all(group, rows, *lists, use_nccl_stream)

    return wrapped


def _peer_config(shape: Shape, dtype: torch.dtype, ep_size: int) -> Any:
    from tests.parity.megatron import load

    return load("transformer.transformer_config").TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=ep_size,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def peer_layer(shape: Shape, dtype: torch.dtype, weights: dict[str, Tensor], groups: ProcessGroups) -> Layer:
    """Return megatron-core's MoELayer with its all-to-all dispatcher, on the CPU. Call it inside `megatron_on_cpu`."""
    from tests.parity.megatron import load

    specs = load("models.gpt.moe_module_specs")
    collection = load("process_groups_config").ProcessGroupCollection()
    for name in ("tp", "cp", "tp_cp", "dp", "dp_cp", "tp_dp_cp", "ep", "tp_ep"):
        setattr(collection, name, getattr(groups, name))
    collection.expt_tp, collection.expt_dp, collection.expt_dp_gtp_remat = groups.etp, groups.edp, groups.edp
    spec = specs.get_moe_module_spec(use_te=False, num_experts=shape.experts, moe_grouped_gemm=False)
    layer = spec(config=_peer_config(shape, dtype, groups.ep.size()), pg_collection=collection, layer_number=1)
    layer.set_layer_number(1)
    layer.train()
    with torch.no_grad():
        layer.router.weight.copy_(weights["router.weight"])
        for expert, mlp in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
            mlp.linear_fc1.weight.copy_(weights["fc1"][expert])
            mlp.linear_fc2.weight.copy_(weights["fc2"][expert])

    def forward(tokens: Tensor) -> Tensor:
        return layer(tokens.unsqueeze(1))[0].squeeze(1)  # [T, H] -> [T, 1, H] -> [T, H]

    return layer, forward


def step(layer: Layer, tokens: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return output and input gradient [T, H], and the seconds of forward and backward, all ranks having begun."""
    module, forward = layer
    module.zero_grad(set_to_none=True)
    tokens = tokens.detach().requires_grad_()
    dist.barrier()
    started = time.perf_counter()
    output = forward(tokens)
    output.backward(gradient)
    seconds = time.perf_counter() - started
    assert tokens.grad is not None
    return output.detach(), tokens.grad, seconds


def differences(found: dict[str, tuple[Tensor, Tensor]], reference: str, dtype: str) -> dict[str, dict[str, float]]:
    """Return the largest differences of output and input gradient from the reference's.

    Raises:
        AssertionError: one is more than TOLERANCES of the largest value of what it is compared with.
    """
    result: dict[str, dict[str, float]] = {}
    for name, values in found.items():
        result[name] = {}
        for what, value, expected in zip(("dy", "ddx"), values, found[reference], strict=True):
            difference, largest = (value - expected).abs().max().item(), expected.abs().max().item()
            assert difference <= TOLERANCES[dtype] * largest, (name, what, difference, largest)
            result[name] |= {f"max_abs_{what}": difference, f"largest_{what}": largest}
    return result


def measure(case: Case, groups: ProcessGroups) -> dict[str, dict[str, Any]]:
    """Build every layer, compare their results, and time them in turns; returns by name the seconds of this rank."""
    shape, dtype = SHAPES[case.shape], DTYPES[case.dtype]
    weights = make_weights(shape, dtype, torch.Generator().manual_seed(case.seed))
    generator = torch.Generator().manual_seed(1000 + case.seed + groups.ep.rank())
    tokens, gradient = (torch.randn(shape.tokens, shape.hidden, generator=generator).to(dtype) for _ in range(2))
    layers = {name: our_layer(name, shape, dtype, weights, groups) for name in OURS}
    if case.peer:
        layers[PEER] = peer_layer(shape, dtype, weights, groups)
    del weights
    found = {name: step(layer, tokens, gradient)[:2] for name, layer in layers.items()}
    entries: dict[str, dict[str, Any]] = {
        name: {**figures, "seconds": []}
        for name, figures in differences(found, PEER if case.peer else OURS[0], case.dtype).items()
    }
    names = list(layers)
    for index in range(case.rounds + 1):
        gc.collect()
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds = step(layers[name], tokens, gradient)[2]
            entries[name]["seconds"] += [seconds] if index else []  # the first round warms up
    return entries


def measure_all(cases: Sequence[Case]) -> list[dict[str, dict[str, Any]]]:
    """Run on every rank: every case, with the ranks as one expert-parallel group."""
    groups = ProcessGroups.build(dist.get_world_size())
    with megatron_on_cpu() if any(case.peer for case in cases) else contextlib.nullcontext():
        return [measure(case, groups) for case in cases]


def find_peer() -> bool:
    """Whether megatron-core is where `make test-parity` puts it, or can be imported."""
    from tests.parity.megatron import FOLDER

    return FOLDER.is_dir() or "megatron" in sys.modules
