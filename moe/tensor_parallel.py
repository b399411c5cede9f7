"""Tensor parallelism with sequence parallelism, for the parts of a model around the experts.

Between the parts every rank of tp holds its slice of the sequence, [S / TP, B, H]: norms, routers, dispatchers, shared
and dense MLPs compute on it with whole weights. Attention and the vocabulary compute on the whole sequence with their
part of the weights, which are DTensors over tp:

    slice -- all-gather --> linear_qkv: some heads --> attention --> linear_proj: a sum -- reduce-scatter --> slice
    tokens [S, B] --> embedding: some of the vocabulary -- reduce-scatter --> slice
    slice -- all-gather --> output_layer: logits of some of the vocabulary --> vocab_parallel_cross_entropy

So the gradient of a DTensor over tp is whole, and that of a plain parameter is a part of a sum over tp:
`finalize_gradients` adds it up.

Source: Megatron-LM, arXiv:1909.08053, section 3; sequence parallelism: arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe.config import TransformerConfig
from moe.parallel import ProcessGroups, gather_over_tp, local_tensor


def check_tensor_parallel(config: TransformerConfig, groups: ProcessGroups | None) -> None:
    """Raise ValueError for what a model cannot split over tp and cp.

    Raises:
        ValueError: context parallelism; TP without sequence_parallel; heads or vocabulary that TP does not divide.
    """
    if groups is None:
        return
    if groups.cp.size() > 1:
        raise ValueError(
            f"context_parallel_size ({groups.cp.size()}) must be 1 for a MoETransformerBlock in this version; MoELayer"
            " alone takes slices of the context."
        )
    size = groups.tp.size()
    if size == 1:
        return
    if not config.sequence_parallel:
        raise ValueError(
            f"tensor_model_parallel_size ({size}) needs sequence_parallel (False): experts see each token once, so the"
            " ranks of tp must hold different ones. Set it."
        )
    query_groups = config.num_query_groups or config.num_attention_heads
    divided = {
        "num_query_groups" if config.num_query_groups else "num_attention_heads": query_groups,
        "vocab_size": config.vocab_size,
    }
    for name, value in divided.items():
        if value % size:
            raise ValueError(f"{name} ({value}) must be divisible by tensor_model_parallel_size ({size}).")


def shard_attention(attention: nn.Module, groups: ProcessGroups | None) -> None:
    """Give this rank its heads: linear_qkv and linear_proj become DTensors over tp. No communication."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    sequence = Shard(0)  # of [S, B, H]
    plan = {
        "linear_qkv": ColwiseParallel(input_layouts=sequence),
        "linear_proj": RowwiseParallel(output_layouts=sequence),
    }
    _parallelize(attention, groups, plan)


def shard_vocabulary(model: nn.Module, groups: ProcessGroups | None) -> None:
    """Give this rank its part of the embedding and of the output layer, as DTensors over tp. No communication."""
    if groups is None or groups.tp.size() == 1:
        return
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel

    embedding = model.get_submodule("embedding")
    weight = distribute_tensor(embedding.get_parameter("weight"), groups.mesh["tp"], (Shard(0),), src_data_rank=None)
    embedding.weight = nn.Parameter(weight)
    _parallelize(model, groups, {"output_layer": ColwiseParallel(input_layouts=Shard(0))})


def embed(tokens: Tensor, embedding: nn.Embedding, groups: ProcessGroups | None) -> Tensor:
    """Return this rank's slice of the embedded sequence: [S, B] int64 -> [S / TP, B, H].

    Not torch's RowwiseParallel: its gradient has the rows of the whole vocabulary on every rank (torch 2.13).

    Collectives: one reduce_scatter over tp, in backward one all_gather, by DTensor.
    """
    if groups is None or groups.tp.size() == 1:
        states: Tensor = embedding(tokens)
        return states
    from torch.distributed.tensor import DTensor, Partial, Shard

    weight = local_tensor(embedding.weight)  # [V / TP, H]
    _check_ids(tokens, embedding.num_embeddings, "token ids")
    local = tokens - groups.tp.rank() * weight.shape[0]
    is_here = (local >= 0) & (local < weight.shape[0])  # [S, B]
    addend = F.embedding(local.where(is_here, 0), weight).where(is_here.unsqueeze(-1), 0.0)  # [S, B, H]
    whole = DTensor.from_local(addend, groups.mesh["tp"], (Partial(),), run_check=False)
    return whole.redistribute(placements=(Shard(0),)).to_local()  # [S, B, H] -> [S / TP, B, H]


def _parallelize(module: nn.Module, groups: ProcessGroups | None, plan: dict[str, Any]) -> None:
    """Apply torch's tensor parallelism. Every rank has drawn the same values, so none are sent."""
    if groups is None or groups.tp.size() == 1:
        return
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(module, groups.mesh["tp"], plan, src_data_rank=None)


def _check_ids(ids: Tensor, num_ids: int, what: str) -> None:
    """Raise IndexError unless ids lie in [0, num_ids), as torch does for a whole vocabulary.

    On CUDA torch's device assertion takes its place: a host sync would cost more than it is worth.
    """
    try:
        torch.empty(num_ids, dtype=torch.bool, device=ids.device).index_select(0, ids.flatten())
    except (IndexError, RuntimeError) as error:
        raise IndexError(f"{what} must lie from 0 to {num_ids - 1}: {error}.") from error


def sequence_slice(states: Tensor, groups: ProcessGroups | None) -> Tensor:
    """Return this rank's slice of a sequence that all ranks of tp hold: [S, ...] -> [S / TP, ...], a view.

    Raises:
        ValueError: TP does not divide S, or there is no sequence.
    """
    if groups is None or groups.tp.size() == 1:
        return states
    size, length = groups.tp.size(), states.shape[0]
    if states.shape[1] == 0:
        raise ValueError(
            f"A micro-batch without sequences (B = 0) has no meaning for tensor_model_parallel_size ({size}): pass one"
            " of padding alone."
        )
    if length % size:
        raise ValueError(
            f"The sequence length ({length}) must be divisible by tensor_model_parallel_size ({size}); pad it to"
            f" {length + size - length % size} and mask the padding."
        )
    return states.chunk(size)[groups.tp.rank()]


def whole_logits(logits: Tensor, groups: ProcessGroups | None) -> Tensor:
    """Return the logits of the whole vocabulary on every rank of tp: [..., V / TP] -> [..., V].

    Collectives: one all_gather over tp by DTensor.
    """
    if groups is None or groups.tp.size() == 1:
        return logits
    from torch.distributed.tensor import DTensor, Shard

    placements = (Shard(logits.ndim - 1),)
    return DTensor.from_local(logits, groups.mesh["tp"], placements, run_check=False).full_tensor()


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, groups: ProcessGroups, ignore_index: int) -> Tensor:
    """Return the sum of the cross-entropies, of logits whose vocabulary is spread over tp.

    Args:
        logits: [N, V / TP], this rank's part of the vocabulary; any floating dtype.
        targets: [N] int64 ids in the whole vocabulary, the same on every rank of tp, or ignore_index for no loss.
        groups: with tp.
        ignore_index: marks targets without a loss; negative.

    Returns:
        [] fp32 (fp64 for fp64), in nats, the same on every rank of tp.

    Saved for backward: the logits as they are, and [N] in fp32.

    Collectives: one all_gather of [2, N] fp32 (fp64 for fp64) over tp in forward, none in backward.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, targets, groups, ignore_index)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """logits [N, V / TP], targets [N] -> []; see `vocab_parallel_cross_entropy`.

    Each rank adds up exp over its part; of all ranks' (log of that sum, logit of the target or 0) every rank computes
    the same loss. The gradient of a logit is its softmax, minus 1 at the target.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, groups: ProcessGroups, ignore_index: int) -> Tensor:
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
            raise ValueError(
                f"labels ({targets.numel()}, {targets.dtype}) must be int64, one for each of {logits.shape[0]} tokens."
            )
        _check_ids(targets.where(targets != ignore_index, 0), logits.shape[1] * groups.tp.size(), "labels")
        is_valid = targets != ignore_index  # [N]
        local = targets - groups.tp.rank() * logits.shape[1]  # [N], indices into this rank's part, or outside
        is_here = is_valid & (local >= 0) & (local < logits.shape[1])
        local = local.where(is_here, 0)
        own_logit = values.gather(1, local.unsqueeze(1)).squeeze(1).where(is_here, 0.0)  # [N]
        parts = gather_over_tp(torch.stack([values.logsumexp(1), own_logit]), groups)  # [2, N] -> [TP, 2, N]
        log_sum = parts[:, 0].logsumexp(0)  # [N]
        ctx.save_for_backward(logits, log_sum, local, is_here, is_valid)
        return (log_sum - parts[:, 1].sum(0)).where(is_valid, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, local, is_here, is_valid = ctx.saved_tensors
        grads = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()  # [N, V / TP]
        grads.scatter_add_(1, local.unsqueeze(1), -is_here.to(grads.dtype).unsqueeze(1))
        grads.mul_((grad * is_valid).unsqueeze(1))
        return grads.to(logits.dtype), None, None, None
