"""The balancing losses of one micro-batch over the ranks that share it, and the one rule for their scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from router.choice import column_counts
from router.collectives import Counter, all_reduce_sum
from router.config import RouterConfig
from router.losses import Sequences, loss_scores, switch_load_balancing_loss_func, z_loss_func


@dataclass(frozen=True)
class LossGroups:
    """Over which ranks losses are taken, and the one rule for their scale.

    A loss over a group is the sum of shares, one of each rank. Gradients of dense parameters are summed over TP and
    averaged over DP x CP, so a share is multiplied by the averaged part of its group: the CP size over tp_cp, the DP x
    CP size over all ranks. With calculate_per_token_loss gradients are summed and divided by the number of all tokens,
    so a share is multiplied by the tokens of its group: micro-batches count by their tokens. No other factor anywhere.

    Differs from Megatron-Core: the gradient of global_aux_loss is the same on any number of DP ranks; a sequence is
    balanced by its own valid tokens, not by the mean number; counts of unequal micro-batches weigh by their tokens.

    Attributes:
        tp_cp: ranks that hold slices of one micro-batch; None on one process.
        tp_dp_cp: all ranks; None on one process.
        cp_size, dp_cp_size: ranks over which gradients are averaged, inside tp_cp and in all.
        counter: counts the collectives; None counts nothing.
        handle: in a compiled graph, the router whose groups these are; else None.
    """

    tp_cp: dist.ProcessGroup | None = None
    tp_dp_cp: dist.ProcessGroup | None = None
    cp_size: int = 1
    dp_cp_size: int = 1
    counter: Counter | None = None
    handle: Any = None

    def sum_over(self, name: str, values: Tensor) -> Tensor:
        """Return the sum of values over the ranks of the group of this name, in new storage: one all_reduce."""
        if self.handle is None or getattr(self, name) is None:
            return all_reduce_sum(values, group=getattr(self, name), name=name, counter=self.counter)
        from router.compiled import sum_over_group

        return sum_over_group(values, self.handle, name)


@dataclass(frozen=True)
class Losses:
    """What `balancing_losses` returns.

    Attributes:
        total: [], this rank's share of the weighted sum, scaled by the rule of LossGroups.
        logged: each loss without its coefficient, [] times the size of its group: the mean over all ranks is the loss.
        global_counts: [E + 1] int64, with global_aux_loss: counts and tokens of this micro-batch over all ranks.
    """

    total: Tensor
    logged: dict[str, Tensor]
    global_counts: Tensor | None


def balancing_losses(
    config: RouterConfig,
    logits: Tensor,
    padding: Tensor | None,
    sequences: Sequences,
    groups: LossGroups,
    *,
    global_tokens: Tensor | None,
    backend: str | None,
    routing_map: Tensor | None = None,
) -> Losses:
    """Return the auxiliary losses and the z-loss of a micro-batch.

    Args:
        config: which losses, with which coefficients.
        logits: [T, E].
        padding: [T] bool, True = padding; or None.
        sequences: which tokens seq_aux_loss balances together; N must be the same on every rank of tp_cp.
        groups: over which ranks.
        global_tokens: [E + 1] int64, counts and tokens of the earlier micro-batches of the step, for global_aux_loss.
        backend: as in `route`.
        routing_map: [T, E] bool, the plain top-k of the scores where it is known; else it is computed.

    Collectives: one all_reduce of [(1 + N), E + 1] int64 over tp_cp (N rows with seq_aux_loss alone); with
        global_aux_loss one of [1, E + 1] over tp_dp_cp.

    Source: aux_loss: Switch Transformers, arXiv:2101.03961, section 2.2; seq_aux_loss: DeepSeek-V3, arXiv:2412.19437,
        section 2.1.2, mean over sequences with tokens; global_aux_loss: arXiv:2501.11873, counts of the step so far.
    """
    coeffs, topk = config.aux_loss_coeffs, config.moe_router_topk
    valid = (torch.ones_like(logits[:, 0], dtype=torch.bool) if padding is None else ~padding).unsqueeze(-1)  # [T, 1]
    parts, scores = [valid], logits.new_zeros(())
    if coeffs:
        function = config.moe_router_score_function
        routing_map, scores = loss_scores(logits, topk, function, backend=backend, routing_map=routing_map)
        parts = [routing_map if padding is None else routing_map & valid, valid]  # [T, E], and a column of tokens
        scores = scores if padding is None else scores.masked_fill(~valid, 0.0)
    # A row of E + 1 for each balanced unit: the batch as a whole, then each sequence.
    local = joined = torch.cat([column_counts(part) for part in parts]).unsqueeze(0)
    if "seq_aux_loss" in coeffs:
        joined = torch.cat([local, sequences.sum(torch.cat(parts, dim=1).to(torch.int64))])
    num_tokens = (shared := groups.sum_over("tp_cp", joined))[0, -1]
    weight: Tensor | int = num_tokens if config.calculate_per_token_loss else groups.cp_size
    total, logged, global_counts = logits.new_zeros(()), {}, None
    for name, coeff in coeffs.items():
        units, table, factor, group = Sequences(1), shared[:1], weight, groups.tp_cp
        if name == "seq_aux_loss":
            units, table = sequences, shared[1:]
        elif name == "global_aux_loss":
            now, group = groups.sum_over("tp_dp_cp", local), groups.tp_dp_cp
            factor = now[0, -1] if config.calculate_per_token_loss else groups.dp_cp_size
            table, global_counts = _counts_so_far(now, global_tokens), now[0]
        share = _switch_loss(scores, table, units, topk, backend)
        logged[name] = share.detach() * _size(group)
        total = total + coeff * (factor * share)
    if config.moe_z_loss_coeff:
        share = z_loss_func(logits, 1.0, padding, total_num_tokens=num_tokens)
        logged["z_loss"] = share.detach() * _size(groups.tp_cp)
        total = total + config.moe_z_loss_coeff * (weight * share)
    return Losses(total, logged, global_counts)


def _switch_loss(scores: Tensor, table: Tensor, units: Sequences, topk: int, backend: str | None) -> Tensor:
    """This rank's share of the switch loss of scores [T, E], the mean over the units that have tokens.

    table [units, E + 1] holds the counts of each unit over the ranks, and its tokens.
    """
    sizes = (topk, scores.shape[1])
    if units.num_sequences == 1 and units.ids is None:
        return switch_load_balancing_loss_func(scores, table[0, :-1], table[0, -1], *sizes, 1.0, backend == "te")
    sums = units.sum(scores).unsqueeze(1)  # [T, E] -> [units, 1, E]
    shares = switch_load_balancing_loss_func(sums, table[:, :-1], table[:, -1], *sizes, 1.0)  # -> [units]
    return shares.sum() / (table[:, -1] > 0).sum().clamp(min=1)


def _size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group, 1 without one."""
    return 1 if group is None else group.size()


def _counts_so_far(now: Tensor, earlier: Tensor | None) -> Tensor:
    """[1, E + 1] int64 counts of this micro-batch, [E + 1] of the earlier ones -> [1, E + 1] fp64, both together.

    Scaled to this micro-batch's tokens, which divide its scores too: with equal micro-batches this is their mean.
    """
    so_far = (now if earlier is None else now + earlier).double()
    return so_far * (now[:, -1:] / so_far[:, -1:].clamp(min=1))
