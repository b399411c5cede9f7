"""The Triton kernel that pads the routing map, run by Triton's interpreter on CPU tensors, beside the plain function.

In a process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.parity import megatron

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
from router import pad_routing_map
from router.padding_triton import pad_columns

torch.manual_seed(0)
sizes = [(1, 1, 1), (1, 3, 1), (64, 5, 4), (48, 33, 16), (257, 16, 1), (256, 17, 16), (1024, 40, 128), (3008, 18, 32)]
for num_tokens, num_experts, pad_multiple in sizes:
    for density in (0.02, 0.4, 1.0):
        for layout in ("rows", "columns", "slice"):
            routing_map = torch.rand(num_tokens, num_experts) < density
            routing_map[:, 0] = False
            if layout == "columns":
                routing_map = routing_map.t().contiguous().t()
            if layout == "slice":
                routing_map = torch.cat([routing_map, ~routing_map], dim=1)[:, :num_experts]
            before, version = routing_map.clone(), routing_map._version
            padded = pad_columns(routing_map, pad_multiple)
            assert torch.equal(routing_map, before) and routing_map._version == version
            assert padded.is_contiguous() and padded.dtype == torch.bool
            assert not padded[:, 0].any()
            wanted = before.clone()
            for expert in range(num_experts):
                free = (~before[:, expert]).nonzero().flatten()
                wanted[free[: int(-before[:, expert].sum() % pad_multiple)], expert] = True
            assert torch.equal(padded, wanted), (num_tokens, num_experts, pad_multiple, density, layout)
            if num_tokens % pad_multiple == 0:
                assert torch.equal(padded, pad_routing_map(routing_map, pad_multiple))
assert pad_columns(torch.zeros(0, 4, dtype=torch.bool), 16).shape == (0, 4)
print("checked", len(sizes))
"""


def test_the_kernel_equals_the_plain_function() -> None:
    path = os.pathsep.join([str(ROOT), str(megatron.FOLDER.parent / "triton")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["checked", "8"]
