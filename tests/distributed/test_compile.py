"""A compiled layer over ranks: the bits of eager mode, in forward, backward and state."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from moe import MoEConfig, MoELayer, ProcessGroups, apply_fsdp
from tests.ranks import run_ranks

OPTIONS = {
    "hidden_size": 16,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_dtype": "fp64",
    "params_dtype": torch.float64,
}


def _layer(**sizes):
    groups = ProcessGroups.build(**sizes)
    torch.manual_seed(0)
    return MoELayer(MoEConfig(**OPTIONS), groups), groups


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _differences(sizes):
    """Return the index of what differs between an eager and a compiled layer, and how often the latter compiled."""
    eager, groups = _layer(**sizes)
    twin = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    differences, counted = [], []
    for seed, length in enumerate((5, 3, 7, 0, 9)):
        torch.manual_seed(seed + 10 * dist.get_rank())
        hidden, results = torch.randn(length + dist.get_rank(), 1, 16, dtype=torch.float64), []
        for run, module in ((eager, eager), (compiled, twin)):
            leaf = hidden.clone().requires_grad_()
            module.zero_grad()
            groups.counter.reset()
            output = run(leaf)
            output.square().sum().backward()
            grads = [_local(parameter.grad) for parameter in module.parameters()]
            counted.append(groups.counter.table())
            results.append([output, leaf.grad, *grads, *module.buffers()])
        pairs = zip(*results, strict=True)
        differences += [(seed, index) for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    assert counted[::2] == counted[1::2]
    assert any(value.abs().sum() > 0 for value in grads)
    return differences, counter.frame_count


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_model_parallel_size": 2},
        pytest.param({"expert_tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["ep", "etp", "tp and ep"],
)
def test_a_compiled_layer_over_two_ranks(sizes):
    for differences, num_compilations in run_ranks(_differences, 2, sizes):
        assert differences == []
        assert num_compilations <= 3


def _refusal(fullgraph):
    layer, groups = _layer()
    apply_fsdp(layer, groups)
    with pytest.raises((RuntimeError, ValueError), match="does not go with apply_fsdp") as caught:
        torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(torch.randn(4, 1, 16, dtype=torch.float64))
    return caught.type is ValueError


@pytest.mark.slow
def test_fsdp_is_refused_by_name():
    assert run_ranks(_refusal, 2, True) == [False, False]
    assert run_ranks(_refusal, 2, False) == [True, True]
