"""Rows as FP8 on the wire: rounding against a table of all codes, the stated bound, and gradients."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from dispatchers import (
    DispatcherConfig,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEDeduplicatedTokenDispatcher,
)
from dispatchers.fp8_rows import pack_rows, packed_width, unpack_rows
from moe.parallel import ProcessGroups
from tests.dispatchers.test_alltoall import random_routing
from tests.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@cache
def e4m3_codes() -> tuple[tuple[float, int], ...]:
    """Return (value, code) of every finite non-negative E4M3 code, by the definition of the format."""
    table = []
    for code in range(127):  # 127 is NaN
        exponent, mantissa = code >> 3, code & 7
        table.append(((1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6, code))
    return tuple(table)


def nearest_e4m3(value: float) -> float:
    """Round to the nearest code, ties to the even one."""
    best = min(e4m3_codes(), key=lambda entry: (abs(abs(value) - entry[0]), entry[1] & 1))[0]
    return math.copysign(best, value)


def smallest_scale(amax: float) -> float:
    """Return the smallest power of two, from 2^-127 on, that brings amax to at most 448; 1 for amax = 0."""
    exponent = -127
    while amax and amax / 2.0**exponent > 448.0:
        exponent += 1
    return 2.0**exponent if amax else 1.0


def test_values_and_scales_against_all_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 300, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(-30, 3, 900, base=2, dtype=torch.float64)[torch.randperm(900, generator=generator)].view(
        3, 300
    )
    rows[0, 128:256] = 0
    expected = torch.empty_like(rows)
    for row in range(3):
        for first in (0, 128, 256):
            block = rows[row, first : first + 128]
            scale = smallest_scale(float(block.abs().max()))
            expected[row, first : first + 128] = torch.tensor([nearest_e4m3(v / scale) * scale for v in block.tolist()])
    packed = pack_rows(rows)
    assert packed.shape == (3, packed_width(300)) == (3, 303)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_rows(packed, 300, torch.float64), expected)
    for dtype in (torch.float32, torch.bfloat16):  # a power of two times four bits is exact in both
        assert torch.equal(unpack_rows(packed, 300, dtype).double(), expected)


@given(
    arrays(np.float32, (2, 130), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.sampled_from(DTYPES),
)
def test_error_bound_and_that_packing_again_changes_nothing(values: Any, dtype: torch.dtype) -> None:
    rows = torch.from_numpy(values).to(dtype)
    rows = torch.where(rows.isfinite(), rows, 0)  # the largest fp32 overflows in bf16
    back = unpack_rows(pack_rows(rows), 130, dtype)
    wide = rows.double()
    amax = torch.cat(
        [wide[:, :128].abs().amax(1, True).expand(2, 128), wide[:, 128:].abs().amax(1, True).expand(2, 2)], 1
    )
    bound = torch.maximum(wide.abs() * 2.0**-4, amax * 2.0**-17).clamp(min=2.0**-137)
    finite = back.isfinite()  # rounding up may leave the range of fp32
    assert ((back.double() - wide).abs() <= bound)[finite].all()
    assert (wide.abs()[~finite] > 3e38).all()
    again = unpack_rows(pack_rows(torch.where(finite, back, 0)), 130, dtype)
    if finite.all():
        assert torch.equal(again, back)


def test_non_finite_values_are_not_hidden() -> None:
    rows = torch.ones(3, 256)
    rows[0, 3], rows[1, 200] = torch.inf, torch.nan
    back = unpack_rows(pack_rows(rows), 256, torch.float32)
    assert back[0, :128].isnan().all()
    assert torch.equal(back[0, 128:], rows[0, 128:])
    assert back[1, 128:].isnan().all()
    assert torch.equal(back[2], rows[2])


@pytest.mark.parametrize("shape", [(0, 5), (0, 128), (3, 1), (1, 127), (2, 129)])
def test_odd_shapes(shape: tuple[int, int]) -> None:
    rows = torch.randint(-8, 9, shape).float()
    packed = pack_rows(rows)
    assert packed.shape == (shape[0], packed_width(shape[1]))
    assert torch.equal(unpack_rows(packed, shape[1], torch.float32), rows)


KINDS = {
    "alltoall": (MoEAlltoAllTokenDispatcher, {}),
    "allgather": (MoEAllGatherTokenDispatcher, {}),
    "deduplicated": (MoEDeduplicatedTokenDispatcher, {}),
    "nodes": (MoEDeduplicatedTokenDispatcher, {"moe_dispatch_node_size": 2}),
}


def travel(kind: str, groups: ProcessGroups, **fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that came, and the gradients of hidden states and probs of a loss on them."""
    dispatcher_class, more = KINDS[kind]
    named = {"alltoall": "alltoall", "allgather": "allgather"}.get(kind, "deduplicated")
    config = DispatcherConfig(num_moe_experts=8, moe_token_dispatcher_type=named, **more, **fields)
    rank = dist.get_rank()
    hidden = torch.randn(7 + rank, 200, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    probs, routing_map = random_routing(7 + rank, 3, seed=rank)
    probs.requires_grad_()
    expert_input, _ = dispatcher_class(config, groups).dispatch(hidden, probs, routing_map)
    weight = torch.randn(expert_input.tokens.shape, generator=torch.Generator().manual_seed(9))
    ((expert_input.tokens * weight).sum() + expert_input.probs.square().sum()).backward()
    return expert_input.tokens.detach(), hidden.grad, probs.grad


def payload_worker() -> list[str]:
    """fp8 rows keep the bound, their gradient is that of plain rows; fp8 both ways keeps the bound for both."""
    found = []
    for ep, etp in ((4, 1), (2, 2)):
        groups = ProcessGroups.build(ep, etp)
        for kind in KINDS:
            rows, grad, prob_grad = travel(kind, groups)
            fp8 = travel(kind, groups, moe_dispatch_dtype="fp8")
            both = travel(kind, groups, moe_dispatch_dtype="fp8", moe_dispatch_grad_dtype="fp8")
            for name, result in (("fp8", fp8), ("both", both)):
                error = (result[0] - rows).abs()
                if (
                    not error.max() > 0
                    or not (error <= torch.maximum(rows.abs() / 16, rows.abs().max() * 2**-17)).all()
                ):
                    found.append(f"{kind} {name}: rows differ by {error.max()}")
                if not torch.equal(unpack_rows(pack_rows(rows), 200, rows.dtype), result[0]):
                    found.append(f"{kind} {name}: rows are not the packed ones")
                if not torch.equal(result[2], prob_grad):
                    found.append(f"{kind} {name}: gradient of probs")
            if not torch.equal(fp8[1], grad):
                found.append(f"{kind}: fp8 changes the gradient")
            share = (both[1] - grad).abs().max() / grad.abs().max()
            if not 1e-4 < share < 0.2:  # up to 4 addends, and 2 roundings on the way over nodes, of 1/16 each
                found.append(f"{kind}: the gradient of fp8 both ways differs by {share}")
    return found


def test_rows_and_gradients_on_the_wire() -> None:
    assert run_ranks(payload_worker, 4) == [[]] * 4


def test_one_rank_packs_nothing() -> None:
    config = DispatcherConfig(num_moe_experts=8, moe_dispatch_dtype="fp8")
    hidden = torch.randn(4, 3)
    expert_input, _ = MoEAlltoAllTokenDispatcher(config).dispatch(hidden, *random_routing(4, 2, seed=0))
    assert torch.equal(expert_input.tokens, hidden)
