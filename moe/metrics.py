"""What the routers of a model did since the last look: expert load and losses, with one collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.parallel import ProcessGroups, sum_over_world
from router.router import TopKRouter


@dataclass(frozen=True)
class MoEMetrics:
    """Figures of every router of a model, in the order of its modules.

    Attributes:
        layer_names: N names of routers in the model.
        tokens_per_expert: [N, E] int64, slots routed to each expert over all ranks.
        aux_loss, z_loss: [N] fp64, the last losses without their coefficients, mean over the ranks.
    """

    layer_names: tuple[str, ...]
    tokens_per_expert: Tensor
    aux_loss: Tensor
    z_loss: Tensor

    @property
    def load_imbalance(self) -> Tensor:
        """[N] fp64: the fullest expert's load over the mean load; 1 is balanced, 0 says that no token was routed."""
        load = self.tokens_per_expert.double()
        if not self.layer_names:
            return load.new_zeros(0)
        return load.amax(1) / load.mean(1).clamp(min=torch.finfo(torch.float64).tiny)


@torch.no_grad()
def collect_metrics(model: nn.Module, groups: ProcessGroups) -> MoEMetrics:
    """Gather the figures of every router over all ranks and zero the routers' counters.

    Args:
        model: holds N routers, the same on every rank; N may be 0.
        groups: the groups that the model was built with.

    Returns:
        The same on every rank, on the host.

    Raises:
        ValueError: routers with different numbers of experts.

    Collectives: one all_reduce of [N, E + 2] fp64 over all ranks. One host sync.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, TopKRouter)}
    sizes = {router.config.num_moe_experts for router in routers.values()}
    if len(sizes) > 1:
        raise ValueError(f"All routers must have the same number of experts; this model has {sorted(sizes)}.")
    rows = [
        torch.cat([r.tokens_per_expert.double(), r.aux_loss.double()[None], r.z_loss.double()[None]])
        for r in routers.values()
    ]
    table = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.float64)  # [N, E + 2]
    table = sum_over_world(table, groups).cpu()  # sync: figures are for people
    for router in routers.values():
        router.tokens_per_expert.zero_()
    num_ranks = groups.tp_dp_cp.size()
    return MoEMetrics(tuple(routers), table[:, :-2].long(), table[:, -2] / num_ranks, table[:, -1] / num_ranks)
