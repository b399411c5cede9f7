"""Dispatch on a GPU: a captured graph, no host sync in capacity mode, ordered sums, packed rows, deterministic mode."""

import copy
import warnings

import pytest
import torch
from torch import Tensor

from dispatchers import sum_rows
from dispatchers.fp8_rows import pack_rows, unpack_rows
from moe.config import MoEConfig
from moe.layer import MoELayer
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 32, "num_moe_experts": 8, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
CAPACITY = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.25}


def loss_of(layer: MoELayer, hidden: Tensor) -> Tensor:
    return layer(hidden).square().sum()


@pytest.mark.parametrize("fusion", [False, True])
def test_capacity_mode_has_no_host_sync(fusion: bool) -> None:
    layer = MoELayer(MoEConfig(**SIZES, **CAPACITY, moe_router_fusion=fusion)).cuda()
    hidden = torch.randn(40, 2, 32, device="cuda", requires_grad=True)
    loss_of(layer, hidden).backward()  # libraries synchronise when they are first used
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss_of(layer, hidden).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [str(w.message) for w in caught if "synchronizing" in str(w.message)] == []


def test_a_cuda_graph_captures_forward_and_backward() -> None:
    layer = MoELayer(MoEConfig(**SIZES, **CAPACITY)).cuda()
    twin = copy.deepcopy(layer)
    static = torch.randn(40, 2, 32, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss_of(layer, static).backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(layer, static)
        loss.backward()
    for seed in range(3):  # other tokens, other routing, the same graph
        hidden = torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(seed)).cuda().requires_grad_()
        with torch.no_grad():
            static.copy_(hidden)
        graph.replay()
        twin.zero_grad(set_to_none=True)
        expected = loss_of(twin, hidden)
        expected.backward()
        assert_close(loss, expected)
        assert_close(static.grad, hidden.grad)
        for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
            assert_close(p.grad, q.grad, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ordered_sums_equal_the_cpu_bit_by_bit(dtype: torch.dtype) -> None:
    rows, row_ids = torch.randn(5000, 33).to(dtype), torch.randint(700, (5000,))
    expected = sum_rows(rows, row_ids, 701)
    for _ in range(3):
        assert torch.equal(sum_rows(rows.cuda(), row_ids.cuda(), 701, ordered=True).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_rows_equal_the_cpu(dtype: torch.dtype) -> None:
    rows = (torch.randn(300, 500) * torch.logspace(-20, 20, 500)).to(dtype)
    packed = pack_rows(rows.cuda())
    assert torch.equal(packed.cpu(), pack_rows(rows))
    assert torch.equal(unpack_rows(packed, 500, dtype).cpu(), unpack_rows(pack_rows(rows), 500, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode_is_bitwise_the_same_over_runs_and_chunks(dtype: torch.dtype) -> None:
    results: list[list[Tensor]] = []
    for num_chunks in (1, 1, 2, 3):
        torch.manual_seed(0)
        config = MoEConfig(
            **SIZES, params_dtype=dtype, moe_deterministic=True, moe_dispatch_num_chunks=num_chunks, init_method_std=0.2
        )
        layer = MoELayer(config).cuda()
        hidden = torch.randn(203, 1, 32, generator=torch.Generator().manual_seed(1)).to("cuda", dtype).requires_grad_()
        output = layer(hidden)
        output.sum().backward()
        results.append([output.detach(), hidden.grad, *(p.grad for p in layer.parameters())])
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], result, strict=True))
