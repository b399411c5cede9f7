"""The router on a GPU: the decisions and gradients of the CPU, without a host sync."""

import copy

import pytest
import torch
from torch import Tensor

from router import RouterConfig, TopKRouter
from router.fused import is_te_installed
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
    "moe_z_loss_coeff": 0.01,
}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OPTIONS = [
    {},
    LOSSES,
    {**LOSSES, **BIASED, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
    {**LOSSES, "moe_router_score_function": "sqrtsoftplus", "moe_router_topk_scaling_factor": 2.5},
    {"moe_expert_capacity_factor": 0.7},
    {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "position"},
    {"moe_token_rounding_policy": "nearest", "moe_token_rounding_multiple": 16},
    {"moe_router_force_load_balancing": "balanced"},
    {"moe_router_load_balancing_type": "quantile_balancing"},
]


def run(router: TopKRouter, hidden: Tensor, padding: Tensor) -> dict[str, Tensor]:
    hidden = hidden.clone().requires_grad_()
    probs, routing_map = router(hidden, padding)
    (probs * torch.linspace(-1, 1, probs.shape[1], device=probs.device)).sum().backward()
    found = {"probs": probs, "routing_map": routing_map, "hidden": hidden.grad, "weight": router.weight.grad}
    return {**found, **{name: buffer for name, buffer in router.named_buffers() if buffer.dtype == torch.int64}}


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("fields", OPTIONS, ids=str)
def test_decisions_equal_the_cpu_without_a_host_sync(fields: dict, fusion: bool) -> None:
    if "quantile" in str(fields):
        fusion = False
    router = TopKRouter(RouterConfig(hidden_size=24, num_moe_experts=8, **fields, moe_router_fusion=fusion))
    twin, hidden = copy.deepcopy(router).cuda(), torch.randn(40, 3, 24)
    padding = torch.rand(40, 3) < 0.3
    on_gpu = hidden.cuda(), padding.cuda()
    run(twin, *on_gpu)  # kernels are loaded now
    twin.zero_grad()
    for buffer in twin.buffers():
        if buffer.dtype == torch.int64:
            buffer.zero_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = run(twin, *on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, expected in run(router, hidden, padding).items():
        assert_close(actual[name], expected, what=name)


def test_the_backend_is_said() -> None:
    shown = repr(TopKRouter(RouterConfig(hidden_size=24, num_moe_experts=8, moe_router_fusion=True)))
    assert ("Transformer Engine on CUDA" in shown) is is_te_installed()
