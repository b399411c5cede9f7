"""How far bf16 experts are from fp64 on one routing: this library's, and torch's own bf16 products."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moe import MoELayer


def experts_by_torch(x: Tensor, probs: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return the SwiGLU experts' output [T, H] by one torch.mm an expert and projection, all in the dtype of x.

    Args:
        x: [T, H].
        probs: [T, E], zero where not routed.
        weights: fc1 [E, 2F, H] (gate rows, then up rows) and fc2 [E, H, F], in the dtype of x.
    """
    output = torch.zeros_like(x)
    for expert, (fc1, fc2) in enumerate(zip(weights["fc1"], weights["fc2"], strict=True)):
        rows = probs[:, expert].nonzero().squeeze(1)  # [n]
        gate, up = (x[rows] @ fc1.t()).chunk(2, dim=1)  # [n, H] -> [n, F] twice
        y = (F.silu(gate) * up) @ fc2.t()  # [n, F] -> [n, H]
        output.index_add_(0, rows, y * probs[rows, expert].to(x.dtype).unsqueeze(1))
    return output


def relative_errors(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the largest and the median over the tokens of |found - expected| / |expected|, each [T, H], 2-norms."""
    errors = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)  # [T]
    return {"max": errors.max().item(), "median": errors.median().item()}


@torch.no_grad()
def measure_accuracy(
    layer: MoELayer, forward: Callable[[Tensor], Tensor], x: Tensor, weights: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    """Return the errors against fp64 of the layer, and of torch.mm in the dtype of x on the layer's own routing.

    Args:
        layer, forward: as `build` returned them.
        x: [T, H].
        weights: that the layer computes with.
    """
    probs, _ = layer.router(x.unsqueeze(1))  # [T, 1, H] -> [T, E]
    in_fp64 = {name: weight.double() for name, weight in weights.items()}
    expected = experts_by_torch(x.double(), probs.double(), in_fp64)
    found = {"moe": forward(x), "torch.mm": experts_by_torch(x, probs, weights)}
    return {name: relative_errors(output, expected) for name, output in found.items()}
