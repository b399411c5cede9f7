"""What the MoE layers of a model did since the last look: load, drops, padding, losses, bytes; one collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.layer import MoELayer
from moe.parallel import ProcessGroups, sum_over_world
from router.config import AUX_LOSSES
from router.router import TopKRouter
from router.step import routers_of

LOSSES = (*AUX_LOSSES, "z_loss")
BYTES = {  # field -> part of the operations' names; "" is in all of them
    "dispatch_bytes": "dispatch",
    "combine_bytes": "combine",
    "all_reduce_bytes": "all_reduce",
    "communication_bytes": "",
}
COUNTS = ("tokens_per_expert", "dropped_tokens_per_expert", "added_tokens_per_expert")
SLOTS = ("computed_slots", "routed_slots")
FIGURES = ("load_imbalance", "load_entropy", "normalized_load_entropy", "num_dead_experts", "drop_rate", "pad_share")


@dataclass(frozen=True)
class MoEMetrics:
    """Figures of N MoE layers, over all ranks and since the last look; every tensor lies on the host.

    Tables [N, E] are as wide as the layer with the most experts; entries of experts that a layer lacks are 0 and count
    nowhere.

    Attributes:
        layer_names: N names of routers in the model.
        num_experts: E of each layer, zero-computation experts included.
        tokens_per_expert: [N, E] int64, slots that tokens chose, zero-computation experts last.
        dropped_tokens_per_expert: [N, E] int64, of these, what capacity or token rounding dropped.
        added_tokens_per_expert: [N, E] int64, slots that token rounding or padding to capacity added.
        computed_slots: [N] int64, slots that the experts of the layer computed, padding included. 0 for a router that
            is no MoELayer's.
        routed_slots: [N] int64, slots for these experts that the router kept or rounded up, without any padding.
        aux_loss, seq_aux_loss, global_aux_loss, z_loss: [N] fp64, the last losses without their coefficients, mean
            over the ranks that hold the layer.
        dispatch_bytes, combine_bytes, all_reduce_bytes, communication_bytes: what all ranks together handed to other
            ranks, forward and backward, since groups.counter was made or reset: to experts, back from them, in sums
            (gradients, counts), and by all collectives.
    """

    layer_names: tuple[str, ...]
    num_experts: tuple[int, ...]
    tokens_per_expert: Tensor
    dropped_tokens_per_expert: Tensor
    added_tokens_per_expert: Tensor
    computed_slots: Tensor
    routed_slots: Tensor
    aux_loss: Tensor
    seq_aux_loss: Tensor
    global_aux_loss: Tensor
    z_loss: Tensor
    dispatch_bytes: int = 0
    combine_bytes: int = 0
    all_reduce_bytes: int = 0
    communication_bytes: int = 0

    @property
    def load_imbalance(self) -> Tensor:
        """[N] fp64: the fullest expert's load over the mean load; 1 is balanced, 0 says that no token was routed."""
        load = self.tokens_per_expert.double()
        if not self.layer_names:
            return load.new_zeros(0)
        return load.amax(1) * self._sizes / load.sum(1).clamp(min=1)

    @property
    def load_entropy(self) -> Tensor:
        """[N] fp64, nats: -sum p ln p of the experts' shares p of the load; 0 also where no token was routed."""
        load = self.tokens_per_expert.double()
        return torch.special.entr(load / load.sum(1, keepdim=True).clamp(min=1)).sum(1)

    @property
    def normalized_load_entropy(self) -> Tensor:
        """[N] fp64: load_entropy / ln E; 1 is balanced, 0 says one expert (of several) or no token."""
        is_alone = (self._sizes == 1) & self.tokens_per_expert.any(1)
        return torch.where(is_alone, 1.0, self.load_entropy / self._sizes.log().where(self._sizes > 1, 1.0))

    @property
    def dead_experts(self) -> tuple[tuple[int, ...], ...]:
        """The ids, layer by layer, of experts that no token chose; none in a layer that routed no token at all."""
        return tuple(tuple(layer.nonzero().flatten().tolist()) for layer in self._is_dead)

    @property
    def num_dead_experts(self) -> Tensor:
        """[N] int64: how many experts are in `dead_experts`."""
        return self._is_dead.sum(1)

    @property
    def drop_rate(self) -> Tensor:
        """[N] fp64: dropped slots over chosen slots; 0 if no token was routed."""
        return self.dropped_tokens_per_expert.sum(1) / self.tokens_per_expert.sum(1).clamp(min=1).double()

    @property
    def pad_share(self) -> Tensor:
        """[N] fp64: the part of computed slots that is padding: of the map, by the dispatcher, to capacity."""
        padding = (self.computed_slots - self.routed_slots).where(self.computed_slots > 0, 0)
        return padding / self.computed_slots.clamp(min=1).double()

    def to_dict(self) -> dict[str, Any]:
        """Return every figure as Python lists, strings and numbers, for JSON; the keys are always the same.

        Keys: layer_names, num_experts; COUNTS, a list of E numbers a layer; SLOTS, FIGURES, LOSSES, a number a layer;
        dead_experts, a list of ids a layer; BYTES, a number.
        """
        tables = {
            name: [row[:size] for row, size in zip(getattr(self, name).tolist(), self.num_experts, strict=True)]
            for name in COUNTS
        }
        return {
            "layer_names": list(self.layer_names),
            "num_experts": list(self.num_experts),
            **tables,
            **{name: getattr(self, name).tolist() for name in (*SLOTS, *FIGURES, *LOSSES)},
            "dead_experts": [list(ids) for ids in self.dead_experts],
            **{name: getattr(self, name) for name in BYTES},
        }

    def as_scalars(self) -> dict[str, float]:
        """Return one number a key, for TensorBoard and its like; the keys follow from the layers alone.

        Keys: "figure/layer name" for FIGURES and LOSSES, and those of BYTES.
        """
        figures = {name: getattr(self, name).tolist() for name in (*FIGURES, *LOSSES)}
        by_layer = {
            f"{name}/{layer}": float(value)
            for name, values in figures.items()
            for layer, value in zip(self.layer_names, values, strict=True)
        }
        return by_layer | {name: float(getattr(self, name)) for name in BYTES}

    @property
    def _sizes(self) -> Tensor:
        """[N] fp64, num_experts."""
        return torch.tensor(self.num_experts, dtype=torch.float64)

    @property
    def _is_dead(self) -> Tensor:
        """[N, E] bool, True for an expert without a token in a layer with some."""
        exists = torch.arange(self.tokens_per_expert.shape[1]) < self._sizes.unsqueeze(1)
        return exists & (self.tokens_per_expert == 0) & self.tokens_per_expert.any(1, keepdim=True)


@torch.no_grad()
def collect_metrics(model: nn.Module, groups: ProcessGroups, layers: Mapping[str, int] | None = None) -> MoEMetrics:
    """Gather the figures of every MoE layer over all ranks, and zero the counters of these figures.

    Every rank calls it, also one that holds no MoE layer.

    Args:
        model: holds routers anywhere in its modules.
        groups: the groups that the model was built with.
        layers: name -> E of all N routers, the same on every rank; a rank's model holds any part of them. Needed where
            ranks hold different layers (pipeline stages). None: the model's own, the same on every rank.

    Returns:
        The same on every rank, in the order of `layers`.

    Raises:
        ValueError: a router that `layers` lacks, or gives another number of experts.

    Collectives: one all_reduce of [N * (3 E + 7) + 4] fp64 over all ranks, E the largest. One host sync.
    """
    routers = routers_of(model)
    sizes = {name: router.num_experts for name, router in routers.items()} if layers is None else dict(layers)
    _check_layers(routers, sizes)
    computed = {layer.router: layer.computed_slots for layer in model.modules() if isinstance(layer, MoELayer)}
    widest = max(sizes.values(), default=0)
    widths = [widest] * len(COUNTS) + [1] * (len(SLOTS) + len(LOSSES) + 1)
    device = _device_of(model, routers)
    absent = torch.zeros(sum(widths), dtype=torch.float64, device=device)
    rows = [_row(routers[name], computed, widest).to(device) if name in routers else absent for name in sizes]
    sent = torch.tensor([groups.counter.total(part).bytes for part in BYTES.values()], dtype=torch.float64)
    everything = sum_over_world(torch.cat([*rows, sent.to(device)]), groups)
    everything = everything.cpu()  # sync: figures are for people
    for router in routers.values():
        for name in COUNTS:
            getattr(router, name).zero_()
        if router in computed:
            computed[router].zero_()
    table = everything[: -len(BYTES)].view(len(sizes), sum(widths))
    dispatch, combine, all_reduce, communication = map(int, everything[-len(BYTES) :])
    columns = dict(zip((*COUNTS, *SLOTS, *LOSSES, "ranks"), table.split(widths, dim=1), strict=True))
    num_ranks = columns["ranks"].squeeze(1).clamp(min=1)
    return MoEMetrics(
        tuple(sizes),
        tuple(sizes.values()),
        **{name: columns[name].long() for name in COUNTS},
        computed_slots=columns["computed_slots"].squeeze(1).long() // groups.etp.size(),  # each of etp has them all
        routed_slots=columns["routed_slots"].squeeze(1).long(),
        **{name: columns[name].squeeze(1) / num_ranks for name in LOSSES},
        dispatch_bytes=dispatch,
        combine_bytes=combine,
        all_reduce_bytes=all_reduce,
        communication_bytes=communication,
    )


def _check_layers(routers: Mapping[str, TopKRouter], layers: Mapping[str, int]) -> None:
    """Raise ValueError unless `layers` has every router with its number of experts."""
    for name, router in routers.items():
        if layers.get(name) != router.num_experts:
            given = f"gives it {layers[name]}" if name in layers else f"has {', '.join(layers) or 'none'}"
            raise ValueError(
                f"router {name!r} has {router.num_experts} experts, but layers {given}; name every router of all ranks"
                " with its number of experts, zero-computation ones included."
            )


def _device_of(model: nn.Module, routers: Mapping[str, TopKRouter]) -> torch.device:
    """Return where the collective runs: with the counters, else with the model; the CPU for one without tensors."""
    counters = [router.tokens_per_expert for router in routers.values()]
    first = next(iter(counters), None)
    if first is None:
        first = next(model.parameters(), next(model.buffers(), torch.empty(0)))
    return first.device


def _row(router: TopKRouter, computed: Mapping[TopKRouter, Tensor], num_columns: int) -> Tensor:
    """Return what this rank says of a router: COUNTS, each num_columns wide, SLOTS, LOSSES and a 1, in fp64."""
    counts = {name: getattr(router, name).double() for name in COUNTS}
    kept = counts["tokens_per_expert"] - counts["dropped_tokens_per_expert"]
    if not router.config.moe_pad_expert_input_to_capacity:  # else what was added is padding
        kept = kept + counts["added_tokens_per_expert"]
    slots = computed[router].double() if router in computed else kept.new_zeros(())
    routed = kept[: router.config.num_moe_experts].sum() if router in computed else slots
    losses = [getattr(router, name).double() for name in LOSSES]
    wide = [F.pad(count, (0, num_columns - count.shape[0])) for count in counts.values()]
    return torch.cat([*wide, torch.stack([slots, routed, *losses, torch.ones_like(slots)])])
