"""moe_deterministic: bitwise the same outputs and gradients over runs, chunks and expert-parallel sizes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe import MoEConfig, MoELayer, ProcessGroups
from tests.distributed.test_layer import FixedRouter, full
from tests.ranks import run_ranks

NUM_EXPERTS, NUM_TOKENS = 8, 203
SIZES = {"odd": (33, 47), "even": (64, 96), "tiny": (5, 3)}  # H, F
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def global_batch(hidden_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return tokens [T, H], the gradient of their output, probs [T, E] and the map [T, E] of the whole batch."""
    generator = torch.Generator().manual_seed(1)
    tokens, gradient = (torch.randn(NUM_TOKENS, hidden_size, generator=generator).to(dtype) for _ in range(2))
    routing_map = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator) < torch.linspace(0.02, 0.9, NUM_EXPERTS)
    routing_map[:, 1] = False
    probs = torch.rand(
        NUM_TOKENS, NUM_EXPERTS, generator=generator, dtype=torch.float64 if dtype.itemsize > 4 else None
    )
    return tokens, gradient, probs * routing_map, routing_map


def shares(world_size: int) -> list[int]:
    """Return how many tokens each rank has: uneven, one of four has none."""
    return {1: [203], 2: [120, 83], 4: [90, 0, 30, 83], 8: [50, 40, 0, 1, 29, 33, 48, 2]}[world_size]


def run_layer(
    ep: int, etp: int, size: str, dtype: str, num_chunks: int, whole: bool, **fields: Any
) -> dict[str, Tensor]:
    """Return output and gradients of this rank's part of the batch; `whole`: of the expert weights over all ranks."""
    hidden_size, ffn = SIZES[size]
    config = MoEConfig(
        hidden_size=hidden_size,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=ffn * 2,
        moe_router_topk=2,
        params_dtype=DTYPES[dtype],
        moe_router_dtype="fp64" if dtype == "fp64" else "fp32",
        add_bias_linear=etp == 1,
        moe_dispatch_num_chunks=num_chunks,
        **({"moe_deterministic": True} | fields),
    )
    torch.manual_seed(5)
    layer = MoELayer(config, ProcessGroups.build(ep, etp) if dist.is_initialized() else None)
    counts = shares(dist.get_world_size())
    tokens, gradient, probs, routing_map = (
        part.split(counts)[dist.get_rank()].clone() for part in global_batch(hidden_size, DTYPES[dtype])
    )
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            if name.endswith("bias"):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(torch.linspace(-1, 1, local[0].numel()).view(local[0].shape))
    layer.router = FixedRouter(probs, routing_map)
    hidden = tokens.unsqueeze(1).requires_grad_()
    output = layer(hidden)
    output.backward(gradient.unsqueeze(1))
    result = {"output": output.detach(), "hidden": hidden.grad, "probs": layer.router.probs.grad}
    if whole:
        result |= {name: full(p.grad) for name, p in layer.experts.named_parameters()}
    return result


def batch_worker(ep: int, etp: int, num_chunks: int, **fields: Any) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {
        (size, dtype): run_layer(ep, etp, size, dtype, num_chunks, True, **fields) for size in SIZES for dtype in DTYPES
    }


def joined(results: list[dict[tuple[str, str], dict[str, Tensor]]]) -> dict[tuple[str, str, str], Tensor]:
    """Put the ranks' parts together: tokens one after the other, weights as each rank has them, which is the same."""
    whole = {}
    for (size, dtype), tensors in results[0].items():
        for name in tensors:
            parts = [result[size, dtype][name] for result in results]
            is_of_tokens = name in ("output", "hidden", "probs")
            whole[size, dtype, name] = torch.cat(parts) if is_of_tokens else parts[0]
    return whole


def unequal(one: dict[Any, Tensor], other: dict[Any, Tensor]) -> list[Any]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("etp", [1, 2])
def test_equal_over_runs_chunks_and_expert_parallel_sizes(etp: int) -> None:
    ways = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (4, 5)]  # ep, chunks
    results = {way: joined(run_ranks(batch_worker, way[0] * etp, way[0], etp, way[1])) for way in ways}
    base = results[1, 1]
    again = joined(run_ranks(batch_worker, etp, 1, etp, 1))
    assert unequal(base, again) == []
    for way, result in results.items():
        assert unequal(base, result) == [], f"ep, chunks {way}"
    assert all(tensor.isfinite().all() and tensor.count_nonzero() for tensor in base.values())


def unlike_worker() -> bool:
    """Return whether plain mode differs between one chunk and three: else the test above could not fail."""
    one, three = (run_layer(2, 1, "odd", "fp32", chunks, True, moe_deterministic=False) for chunks in (1, 3))
    return any(not torch.equal(one[name], three[name]) for name in one)


def test_without_the_mode_chunks_change_the_last_bits() -> None:
    assert run_ranks(unlike_worker, 2) == [True, True]


def fixed_world_worker() -> list[str]:
    """The same tokens on each of four ranks, experts shared out over 1, 2 and 4 of them."""
    found = []
    for size in SIZES:
        for dtype in DTYPES:
            results = [run_layer(ep, 1, size, dtype, 1, False) for ep in (1, 2, 4)]
            found += [f"{size} {dtype} {key}" for result in results[1:] for key in unequal(results[0], result)]
    return found


def test_equal_over_expert_parallel_sizes_of_one_job() -> None:
    assert run_ranks(fixed_world_worker, 4) == [[]] * 4
