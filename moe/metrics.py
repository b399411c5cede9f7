"""What the routers of a model did since the last look: expert load and losses, with one collective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe.parallel import ProcessGroups, sum_over_world
from router.config import AUX_LOSSES
from router.step import routers_of

LOSSES = (*AUX_LOSSES, "z_loss")
BYTES = ("dispatch", "combine", "")  # parts of the operations' names; "" is in all of them
COUNTS = ("tokens_per_expert", "dropped_tokens_per_expert", "added_tokens_per_expert")


@dataclass(frozen=True)
class MoEMetrics:
    """Figures of every router of a model, in the order of its modules.

    Attributes:
        layer_names: N names of routers in the model.
        tokens_per_expert: [N, E] int64, slots that tokens chose over all ranks, zero-computation experts last.
        dropped_tokens_per_expert: [N, E] int64, of these, what capacity or token rounding dropped.
        added_tokens_per_expert: [N, E] int64, slots that token rounding or padding to capacity added.
        aux_loss, seq_aux_loss, global_aux_loss, z_loss: [N] fp64, the last losses without their coefficients, mean
            over the ranks.
        dispatch_bytes, combine_bytes, communication_bytes: what all ranks together handed to other ranks, forward and
            backward, since groups.counter was made or reset: to experts, back from them, and by all collectives.
    """

    layer_names: tuple[str, ...]
    tokens_per_expert: Tensor
    dropped_tokens_per_expert: Tensor
    added_tokens_per_expert: Tensor
    aux_loss: Tensor
    seq_aux_loss: Tensor
    global_aux_loss: Tensor
    z_loss: Tensor
    dispatch_bytes: int = 0
    combine_bytes: int = 0
    communication_bytes: int = 0

    @property
    def load_imbalance(self) -> Tensor:
        """[N] fp64: the fullest expert's load over the mean load; 1 is balanced, 0 says that no token was routed."""
        load = self.tokens_per_expert.double()
        if not self.layer_names:
            return load.new_zeros(0)
        return load.amax(1) / load.mean(1).clamp(min=torch.finfo(torch.float64).tiny)

    @property
    def drop_rate(self) -> Tensor:
        """[N] fp64: dropped slots over chosen slots; 0 if no token was routed."""
        return self.dropped_tokens_per_expert.sum(1) / self.tokens_per_expert.sum(1).clamp(min=1).double()


@torch.no_grad()
def collect_metrics(model: nn.Module, groups: ProcessGroups) -> MoEMetrics:
    """Gather the figures of every router over all ranks and zero the counters of these figures.

    Args:
        model: holds N routers, the same on every rank; N may be 0.
        groups: the groups that the model was built with.

    Returns:
        The same on every rank, on the host.

    Raises:
        ValueError: routers with different numbers of experts.

    Collectives: one all_reduce of [N * (3 E + 4) + 3] fp64 over all ranks. One host sync.
    """
    routers = routers_of(model)
    sizes = {router.num_experts for router in routers.values()}
    if len(sizes) > 1:
        raise ValueError(f"All routers must have the same number of experts; this model has {sorted(sizes)}.")
    num_experts = sizes.pop() if sizes else 0
    rows = [
        torch.cat([getattr(router, name).double().view(-1) for name in (*COUNTS, *LOSSES)])
        for router in routers.values()
    ]
    widths = [num_experts] * len(COUNTS) + [1] * len(LOSSES)
    table = torch.stack(rows) if rows else torch.zeros(0, sum(widths), dtype=torch.float64)  # [N, 3 E + 4]
    sent = torch.tensor([groups.counter.total(part).bytes for part in BYTES], dtype=torch.float64)
    everything = sum_over_world(torch.cat([table.flatten(), sent.to(table.device)]), groups)
    everything = everything.cpu()  # sync: figures are for people
    table, sent = everything[: table.numel()].view(table.shape), everything[table.numel() :]
    for router in routers.values():
        for name in COUNTS:
            getattr(router, name).zero_()
    columns = dict(zip((*COUNTS, *LOSSES), table.split(widths, dim=1), strict=True))
    counts = {name: columns[name].long() for name in COUNTS}
    losses = {name: columns[name].squeeze(1) / groups.tp_dp_cp.size() for name in LOSSES}
    dispatch_bytes, combine_bytes, communication_bytes = map(int, sent)
    return MoEMetrics(
        tuple(routers),
        **counts,
        **losses,
        dispatch_bytes=dispatch_bytes,
        combine_bytes=combine_bytes,
        communication_bytes=communication_bytes,
    )
