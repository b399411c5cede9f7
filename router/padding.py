"""Padding of the routing map, so that every expert's token count is a multiple that quantized GEMMs need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from router.choice import column_counts


def pad_routing_map(routing_map: Tensor, pad_multiple: int, *, fused: bool = False) -> Tensor:
    """Return a padded copy of the routing map: each non-empty expert's count becomes a multiple of pad_multiple.

    The added slots are the first free tokens of the expert. Their prob is 0, so outputs and gradients do not change.
    Experts without tokens stay empty. The input is not written: its values, version and storage stay.

    Example: the column [1, 0, 0, 1] with pad_multiple 3 becomes [1, 1, 0, 1].

    Args:
        routing_map: [T, E] bool, True where routed. May be a view of any strides.
        pad_multiple: rows per expert that the quantization recipe asks for, at least 1.
        fused: pad CUDA tensors by one Triton kernel; without effect on the CPU.

    Returns:
        [T, E] bool, new contiguous storage.

    Raises:
        ValueError: routing_map is not bool; pad_multiple < 1; or T is no multiple of pad_multiple and some expert has
            too few free tokens.
        ImportError: fused on a CUDA tensor without Triton.

    Host syncs: none if T is a multiple of pad_multiple (the multiple is then always in reach), else one.

    Source: Megatron-Core's pad_routing_map. Differs: that one writes into its argument, and stops short of the
        multiple where tokens run out.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple ({pad_multiple}) must be at least 1.")
    if routing_map.dtype != torch.bool:
        raise ValueError(f"routing_map ({routing_map.dtype}) must be torch.bool, True where routed.")
    num_tokens = routing_map.shape[0]
    counts = column_counts(routing_map)  # [T, E] -> [E]
    num_missing = -counts % pad_multiple
    free = ~routing_map
    if num_tokens % pad_multiple:
        short = num_missing > num_tokens - counts
        if short.any():  # sync: an error must name the expert
            expert = int(short.nonzero()[0])
            count, missing = int(counts[expert]), int(num_missing[expert])
            raise ValueError(
                f"pad_multiple ({pad_multiple}): expert {expert} has {count} of {num_tokens} tokens and needs {missing}"
                f" more, but only {num_tokens - count} are free; use a token count divisible by {pad_multiple}, or the"
                f" dispatcher's slot padding (pad_multiple={pad_multiple} there)."
            )
    if fused and routing_map.is_cuda:
        return _triton_kernel()(routing_map, pad_multiple)
    ranks = free.cumsum(0, dtype=torch.int32)  # [T, E]: 1, 2, .. down the free tokens of each column
    added = free & (ranks <= num_missing)  # [T, E]: the first num_missing of them
    return routing_map.logical_or(added).contiguous()


def _triton_kernel() -> Callable[[Tensor, int], Tensor]:
    try:
        from router.padding_triton import pad_columns
    except ImportError as error:
        raise ImportError(
            f"fused=True (moe_permute_fusion) pads CUDA tensors by a Triton kernel, and Triton is missing ({error}):"
            " pip install triton, or leave the option out."
        ) from error
    return pad_columns


class RoutingMapPadding(nn.Module):
    """The padding stage of the layer: `pad_routing_map` where it cannot fail, else the map as it is.

    Counts that this stage leaves unaligned (the local token count T is no multiple) are aligned by the dispatcher's
    slot padding, which always works. So no shape raises and nothing is synchronised with the host.

    Args:
        pad_multiple: rows per expert that the quantization recipe asks for; 1 turns the stage off.
        fused: see `pad_routing_map`.
    """

    def __init__(self, pad_multiple: int, *, fused: bool = False) -> None:
        super().__init__()
        if pad_multiple < 1:
            raise ValueError(f"pad_multiple ({pad_multiple}) must be at least 1.")
        self.pad_multiple, self.fused = pad_multiple, fused

    def forward(self, routing_map: Tensor) -> Tensor:
        """Return the map for dispatch: [T, E] bool -> [T, E] bool; the argument is never written."""
        if self.pad_multiple == 1 or routing_map.shape[0] % self.pad_multiple:
            return routing_map
        return pad_routing_map(routing_map, self.pad_multiple, fused=self.fused)

    def extra_repr(self) -> str:
        """Show the multiple when the module is printed."""
        return f"pad_multiple={self.pad_multiple}, fused={self.fused}"
