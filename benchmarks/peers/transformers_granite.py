"""The MoE block of Granite in transformers. It routes on logits in the input's dtype."""

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Forward


def _load(module: str) -> Any:
    """Return transformers.models.granitemoe.<module>_granitemoe."""
    return importlib.import_module(f"transformers.models.granitemoe.{module}_granitemoe")


def version() -> str:
    """Return the version of the package; ImportError if it is not there."""
    _load("modeling")
    return importlib.metadata.version("transformers")


def build(
    kind: str, hidden: int, ffn: int, experts: int, topk: int, dtype: torch.dtype, seed: int = 0
) -> tuple[nn.Module, Forward]:
    """Return the block and its forward function on [T, H].

    Args:
        kind: the experts' implementation, "grouped_mm" or "eager".
        hidden, ffn, experts, topk, dtype: H, F, E, K and the dtype of the parameters.
        seed: of the initial weights.
    """
    config = _load("configuration").GraniteMoeConfig(
        hidden_size=hidden, intermediate_size=ffn, num_local_experts=experts, num_experts_per_tok=topk
    )
    config._experts_implementation = kind
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _load("modeling").GraniteMoeMoE(config).to(dtype)

    def forward(hidden_states: Tensor) -> Tensor:
        return module(hidden_states.unsqueeze(0)).squeeze(0)  # [T, H] -> [1, T, H] -> [T, H]

    return module.train(), forward


@torch.no_grad()
def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy router.weight [E, H], fc1 [E, 2F, H] and fc2 [E, H, F] into `build`'s block."""
    module.router.weight.copy_(weights["router.weight"])
    module.experts.gate_up_proj.copy_(weights["fc1"])
    module.experts.down_proj.copy_(weights["fc2"])
