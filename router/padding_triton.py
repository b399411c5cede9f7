"""Padding of the routing map by one Triton kernel, for any number of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 256
BLOCK_EXPERTS = 16


@triton.jit
def _pad_kernel(  # type: ignore[no-untyped-def]  # pointers, numbers and constants of a Triton kernel
    map_ptr,
    out_ptr,
    num_tokens,
    num_experts,
    token_stride,
    expert_stride,
    pad_multiple,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Pad the columns of BLOCK_EXPERTS experts: count in a first walk down the tokens, copy and pad in a second.

    Example: the column [1, 0, 0, 1] with pad_multiple 3 counts 2 and misses 1; the running numbers of its free tokens
    are [_, 1, 2, _], those up to 1 are added: [1, 1, 0, 1].
    """
    experts = tl.program_id(0).to(tl.int64) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    is_expert = (experts < num_experts)[None, :]
    rows = tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    counts = tl.zeros([BLOCK_EXPERTS], dtype=tl.int32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        tokens = start + rows
        inside = (tokens < num_tokens)[:, None] & is_expert
        addresses = map_ptr + tokens[:, None] * token_stride + experts[None, :] * expert_stride
        counts += tl.sum(tl.load(addresses, mask=inside, other=0).to(tl.int32), axis=0)
    missing = (pad_multiple - counts % pad_multiple) % pad_multiple
    num_free = tl.zeros([BLOCK_EXPERTS], dtype=tl.int32)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        tokens = start + rows
        inside = (tokens < num_tokens)[:, None] & is_expert
        addresses = map_ptr + tokens[:, None] * token_stride + experts[None, :] * expert_stride
        routed = tl.load(addresses, mask=inside, other=1).to(tl.int32)
        free = 1 - routed
        number = num_free[None, :] + tl.cumsum(free, axis=0)
        added = (free == 1) & (number <= missing[None, :])
        targets = out_ptr + tokens[:, None] * num_experts + experts[None, :]
        tl.store(targets, tl.where(added, 1, routed).to(tl.uint8), mask=inside)
        num_free += tl.sum(free, axis=0)


def pad_columns(routing_map: Tensor, pad_multiple: int) -> Tensor:
    """Return the padded map: [T, E] bool of any strides -> [T, E] bool, new contiguous storage.

    Every column gets the first free tokens up to the multiple, or all of them where they are too few. A column is
    walked down in blocks, so T is not bounded by what fits into one block; addresses are 64-bit.
    """
    num_tokens, num_experts = routing_map.shape
    out = torch.empty(num_tokens, num_experts, dtype=torch.bool, device=routing_map.device)
    if out.numel() == 0:
        return out
    _pad_kernel[(triton.cdiv(num_experts, BLOCK_EXPERTS),)](
        routing_map.view(torch.uint8),
        out.view(torch.uint8),
        num_tokens,
        num_experts,
        routing_map.stride(0),
        routing_map.stride(1),
        pad_multiple,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_EXPERTS=BLOCK_EXPERTS,
    )
    return out
