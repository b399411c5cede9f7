"""Balancing without a loss: sinkhorn, quantile balancing, and the expert bias that follows the load."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from router.collectives import all_reduce_sum

SINKHORN_EPS = 1e-8  # Megatron-Core's guard of its divisions
SINKHORN_ROW_BOUND = 10.0  # a row whose maximum is beyond +-10 is shifted to it, so that exp stays in range
MAX_SINKHORN_ITERATIONS = 1000  # tens are usual; costs that never converge end here


@torch.no_grad()
def sinkhorn(cost: Tensor, tol: float = 1e-4) -> Tensor:
    """Return exp(cost) with rows and columns scaled until every token has one unit and every expert the same sum.

    Args:
        cost: [T, E] logits. A row that holds NaN or +inf, or nothing but -inf, takes no part and gets zeros.
        tol: the iteration ends when the column factors change by less than this in the mean.

    Returns:
        [T, E] in the dtype of cost, in units of 1 / T a row. Not differentiable.

    Host syncs: one per iteration, to see whether it has converged.

    Source: Megatron-Core moe_utils, function of the same name; Sinkhorn and Knopp, 1967. Differs: exp cannot overflow
        or vanish, because rows far from zero are shifted first: their factor absorbs the shift, but for the guard of
        the divisions. And the number of iterations is bounded.
    """
    highest = cost.amax(-1, keepdim=True) if cost.numel() else cost.new_zeros(cost.shape[0], 1)
    takes_part = highest.isfinite()  # [T, 1]; NaN is the maximum of its row
    shift = highest - highest.clamp(-SINKHORN_ROW_BOUND, SINKHORN_ROW_BOUND)
    kernel = torch.where(takes_part, (cost - shift).exp(), 0.0)
    num_rows = takes_part.sum().clamp(min=1)
    columns = cost.new_ones(cost.shape[1])
    rows = cost.new_ones(cost.shape[0])
    for _ in range(MAX_SINKHORN_ITERATIONS):
        rows = 1.0 / (num_rows * (kernel @ columns + SINKHORN_EPS))
        last, columns = columns, 1.0 / (cost.shape[1] * (kernel.t() @ rows + SINKHORN_EPS))
        if (last - columns).abs().mean() <= tol:  # sync: has it converged
            break
    return columns * kernel * rows.unsqueeze(1)


@torch.no_grad()
def qb_dual_update(
    scores: Tensor, k: int, beta: Tensor, update_beta: bool = True, *, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose experts by scores - beta, and return the beta that would have given every expert the same load.

    A token's threshold is its first score - beta that is not chosen. An expert's beta is the quantile of score -
    threshold above which T * k / E tokens lie.

    Args:
        scores: [T, E]. A row that is not finite has no say in the quantile.
        k: experts per token, below E.
        beta: [E] fp32, the bias of each expert; larger is chosen less.
        update_beta: False returns beta as it is.
        padding_mask: [T] bool, True = padding: such rows have no say in the quantile either.

    Returns:
        The choice [T, k] int64; the quantile [E] in the dtype of scores, beta if no row has a say. T counts the rows
        that have one, and T * k / E is rounded down. No host sync.

    Raises:
        ValueError: k is not below E.

    Source: Megatron-Core moe_utils, function of the same name. Differs: there T * k must be divisible by E.
    """
    num_tokens, num_experts = scores.shape
    if not 1 <= k < num_experts:
        raise ValueError(f"k ({k}) must lie between 1 and the number of experts ({num_experts}) - 1.")
    best = (scores - beta).topk(k + 1, dim=1)
    if not update_beta or num_tokens == 0:
        return best.indices[:, :k], beta
    has_say = scores.isfinite().all(dim=1)  # [T]
    if padding_mask is not None:
        has_say = has_say & ~padding_mask
    margins = (scores - best.values[:, k:]).masked_fill(~has_say.unsqueeze(-1), -torch.inf)
    num_valid = has_say.sum()
    place = (num_valid * k // num_experts).expand(1, num_experts)
    quantile = margins.sort(dim=0, descending=True).values.gather(0, place).squeeze(0)  # [T, E] -> [E]
    return best.indices[:, :k], torch.where(num_valid > 0, quantile, beta.to(quantile.dtype))


@torch.no_grad()
def get_updated_expert_bias(
    tokens_per_expert: Tensor,
    expert_bias: Tensor,
    expert_bias_update_rate: float,
    tp_dp_cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the bias after a step: up by the rate where an expert had less than the mean load, down where it had more.

    Args:
        tokens_per_expert: [..., E] int64, this rank's counts; not written.
        expert_bias: [..., E] fp32.
        expert_bias_update_rate: how far a bias moves.
        tp_dp_cp_group: the ranks whose counts are added up; None: this one alone.

    Returns:
        [..., E] fp32 in new storage.

    Collectives: one all_reduce of the counts over tp_dp_cp_group.

    Source: arXiv:2408.15664, section 3, algorithm 1; Megatron-Core moe_utils, function of the same name. Differs: that
        one reduces into its argument.
    """
    counts = tokens_per_expert.to(torch.int64)
    if tp_dp_cp_group is not None:
        counts = all_reduce_sum(counts, group=tp_dp_cp_group)
    # sign(mean - count) in integers: the mean of E counts need not be a whole number
    below = (counts.sum(-1, keepdim=True) - counts * counts.shape[-1]).sign()
    return expert_bias.float() + below.float() * expert_bias_update_rate
