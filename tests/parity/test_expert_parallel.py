"""A layer on two and three ranks beside megatron-core's all-to-all dispatcher: outputs and input gradients."""

import pytest

from benchmarks.expert_parallel_ranks import OURS, PEER, Case, measure_all
from tests.ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_layers_agree_with_megatron_core(num_ranks: int) -> None:
    cases = [Case(shape="tiny", dtype=dtype, rounds=1) for dtype in ("fp32", "bf16")]
    for by_case in run_ranks(measure_all, num_ranks, cases):
        for entries in by_case:  # measure_all has compared the values
            assert list(entries) == [*OURS, PEER]
            assert min(entry["largest_dy"] for entry in entries.values()) > 0.1
