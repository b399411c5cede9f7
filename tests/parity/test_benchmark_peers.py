"""The adapters of benchmarks/peers compute what this library computes from the same weights."""

import importlib
import sys

import pytest
import torch
from torch import Tensor

from benchmarks import layer, peers
from benchmarks.floors import Shape, make_weights

SHAPE = Shape(tokens=40, hidden=32, ffn=24, experts=6, topk=2)
# Relative, of the whole tensor; fp32 elsewhere. torchtitan's own experts round all that they multiply to bf16.
TOLERANCE = {"torchtitan-bf16-experts": 2.0**-6}
NEEDS_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11")
NAMES = [
    pytest.param(name, marks=NEEDS_311 if adapter.package == "torchtitan" else ())
    for name, adapter in peers.ADAPTERS.items()
]


def run(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return output and gradient of the input of one forward and backward; "moe" is this library."""
    adapter = peers.ADAPTERS.get(name)
    source = layer if adapter is None else importlib.import_module(adapter.module)
    generator = torch.Generator().manual_seed(0)
    weights = make_weights(SHAPE, dtype, generator)
    x, y_grad = (torch.randn(SHAPE.tokens, SHAPE.hidden, generator=generator).to(dtype) for _ in range(2))
    module, forward = source.build("softmax_post" if adapter is None else adapter.kind, *SHAPE[1:], dtype, 1)
    source.set_weights(module, weights)
    x.requires_grad_()
    y = forward(x)
    y.backward(y_grad)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert all(parameter.grad is not None for parameter in module.parameters())
    return {"y": y.detach(), "dx": x.grad}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_computes_the_library_s_output(name: str) -> None:
    ours, theirs = run("moe", torch.float32), run(name, torch.float32)
    tolerance = TOLERANCE.get(name, 1e-5)
    for result in ours:
        error = (theirs[result] - ours[result]).norm() / ours[result].norm()
        assert error < tolerance, (result, error)
    if name in TOLERANCE:  # and no closer, or the experts would not be those of the package
        assert error > 2.0**-12


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_computes_most_tokens_alike_in_bf16(name: str) -> None:
    ours, theirs = run("moe", torch.bfloat16), run(name, torch.bfloat16)
    distance = (theirs["y"] - ours["y"]).float().norm(dim=1) / ours["y"].float().norm(dim=1)  # [T]
    assert distance.median() < 2.0**-6
    assert theirs["y"].dtype == torch.bfloat16


@NEEDS_311
def test_the_versions_are_those_that_make_fetches() -> None:
    assert peers.versions(peers.ADAPTERS) == {
        "megatron-core": "0.19.2",
        "transformers": "5.23.0",
        "torchtitan": "0.3.0",
    }
