"""torchtitan's MoE with its local dispatcher. Its experts multiply in bf16 whatever the dtype of the parameters.

So "bf16 experts" is the package as it is, and in fp32 its output has the accuracy of bf16. "fp32 experts" is its layer
with one method of ours in place of the experts' forward: the same three grouped products, in fp32.
"""

import importlib.metadata
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import Forward
from tests.parity.megatron import import_on_cpu

FOLDER = Path(sys.prefix) / "parity" / "torchtitan"
KINDS = ("bf16 experts", "fp32 experts")


def _load(module: str) -> Any:
    """Return torchtitan.models.common.<module>."""
    return import_on_cpu(f"torchtitan.models.common.{module}", FOLDER)


def version() -> str:
    """Return the version of the package; ImportError if it is not there."""
    _load("moe")
    return importlib.metadata.version("torchtitan")


def _config(hidden: int, ffn: int, experts: int, topk: int) -> Any:
    """Return the layer's config: softmax over the selected logits, no balancing."""
    moe, dispatcher = _load("moe"), _load("token_dispatcher").LocalTokenDispatcher
    return moe.MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=hidden, hidden_dim=ffn, num_experts=experts),
            token_dispatcher=dispatcher.Config(num_experts=experts, top_k=topk),
        ),
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=experts,
            gate=_load("linear").Linear.Config(in_features=hidden, out_features=experts),
            top_k=topk,
            score_func="softmax",
            route_norm=True,
        ),
    )


def fp32_experts(experts: nn.Module, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return what the experts of the package return, multiplied in fp32: rows [R, H], sorted by expert -> [R, H]."""
    offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)  # [E]

    def product(left: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(left, weight.float().transpose(-2, -1), offs=offsets)

    tokens = rows.float()
    hidden = F.silu(product(tokens, experts.w1_EFD)) * product(tokens, experts.w3_EFD)  # [R, H] -> [R, F]
    return product(hidden, experts.w2_EDF).to(rows.dtype)  # [R, F] -> [R, H]


def build(
    kind: str, hidden: int, ffn: int, experts: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, Forward]:
    """Return the layer and its forward function on [T, H].

    Args:
        kind: of KINDS.
        hidden, ffn, experts, topk, dtype: H, F, E, K and the dtype of the parameters.
        seed: of the initial weights.

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind ({kind!r}) must be one of {KINDS}.")
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)  # of the parameters; its counters name theirs
        try:
            module = _config(hidden, ffn, experts, topk).build()
        finally:
            torch.set_default_dtype(default)
    if kind == "fp32 experts":
        inner = module.routed_experts.inner_experts
        inner.forward = partial(fp32_experts, inner)

    def forward(hidden_states: Tensor) -> Tensor:
        return module(hidden_states.unsqueeze(0)).squeeze(0)  # [T, H] -> [1, T, H] -> [T, H]

    return module.train(), forward


@torch.no_grad()
def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy router.weight [E, H], fc1 [E, 2F, H] (gate rows, then up rows) and fc2 [E, H, F] into `build`'s layer."""
    experts = module.routed_experts.inner_experts
    gate, up = weights["fc1"].chunk(2, dim=1)  # [E, F, H] each
    module.router.gate.weight.copy_(weights["router.weight"])
    experts.w1_EFD.copy_(gate)
    experts.w3_EFD.copy_(up)
    experts.w2_EDF.copy_(weights["fc2"])
