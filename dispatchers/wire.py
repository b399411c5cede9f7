"""What each dispatcher hands over, by formula: bytes of a row, beside it, and the mean number of rows.

Legend: `T` tokens of a rank, `H` hidden size, `E` experts, `K` top-k, `n` ranks of EP x ETP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dispatchers.collectives import Payload
from dispatchers.fp8_rows import packed_width

COUNT_BYTES = 8  # int64
ID_BYTES = 2  # int16


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Bytes of the messages of one dispatcher.

    Attributes:
        row: a dispatched row.
        returned: a combined row, and its gradient.
        row_gradient: the gradient of a dispatched row.
        beside, beside_gradient: what travels with each (row, expert) pair of a dispatch, and back in its backward; with
            allgather with each row.
        counts: what every rank tells every rank before a dispatch.
    """

    row: int
    returned: int
    row_gradient: int
    beside: int
    beside_gradient: int
    counts: int


def wire_format(
    name: str,
    hidden_size: int,
    itemsize: int,
    num_experts: int,
    ep_size: int,
    *,
    num_nodes: int = 1,
    payload: Payload = "plain",
    prob_bytes: int = 4,
) -> WireFormat:
    """Return the format of a dispatcher.

    Args:
        name: "alltoall", "capacity" (its capacity mode), "deduplicated" or "allgather".
        hidden_size: H of the rows.
        itemsize: bytes of a value.
        num_experts: E.
        ep_size: expert-parallel ranks.
        num_nodes: with two levels of deduplication, the nodes.
        payload: how rows cross, as in `start_all_to_all_rows`.
        prob_bytes: of a prob.

    Raises:
        ValueError: another name.
    """
    plain = hidden_size * itemsize
    packed = packed_width(hidden_size)
    if name in ("alltoall", "capacity"):
        beside, gradient, num_counts = prob_bytes, prob_bytes, num_experts if name == "alltoall" else 0
    elif name == "deduplicated":
        beside, gradient, num_counts = prob_bytes + ID_BYTES, prob_bytes, num_experts + ep_size + num_nodes
    elif name == "allgather":  # probs and the map (bool) of each rank's experts
        num_local = num_experts // ep_size
        beside, gradient, num_counts = (prob_bytes + 1) * num_local, prob_bytes * num_local, num_experts + 1
    else:
        raise ValueError(f"name ({name!r}) must be 'alltoall', 'capacity', 'deduplicated' or 'allgather'.")
    return WireFormat(
        row=plain if payload == "plain" else packed,
        returned=plain,
        row_gradient=packed if payload == "fp8 both ways" else plain,
        beside=beside,
        beside_gradient=gradient,
        counts=COUNT_BYTES * num_counts,
    )


def mean_targets(num_experts: int, topk: int, num_targets: int) -> float:
    """Return how many of num_targets equal blocks of experts a token reaches whose K experts are drawn evenly.

    A block of E / n experts is missed with probability C(E - E / n, K) / C(E, K).
    """
    missed = math.comb(num_experts - num_experts // num_targets, topk) / math.comb(num_experts, topk)
    return num_targets * (1 - missed)
