"""Bytes that a forward of MoEGPT saves for backward, by formula.

docs/memory.md states them. The legend is that of `moe.memory`; `D` is the width of a head, `h` and `g` the query and
key heads of this rank. Norms, attention and logsigmoid save different things on a CPU and on a GPU; the rest does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from dispatchers.permutation import sum_dtype
from moe.config import TransformerConfig
from moe.gemm import gemm_dtype
from moe.layout import Batch, Layout, Load, block_kinds, expert_load
from moe.quantization.stored import STORED_BLOCK
from router.config import ROUTER_DTYPES
from router.fused import FEWEST_BYTES

Recompute = Literal["none", "mlp", "layer", "block"]
RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "mlp", "layer", "block")
INDEX_BYTES = 8  # int64
SCALE_BYTES = {"fp32": 4, "pow2": 4, "e8m0": 1, "e4m3": 1}
CUDA = torch.device("cuda")


def saved_bytes(
    config: TransformerConfig,
    layout: Layout,
    batch: Batch,
    recompute: Recompute = "none",
    *,
    device: torch.device = CUDA,
) -> float:
    """Return what one micro-batch's forward keeps until backward, parameters apart.

    Args:
        config: the model.
        layout: the ranks.
        batch: what a rank computes.
        recompute: "none"; "mlp": moe_recompute="mlp", the experts' first product is made again in backward; "layer":
            moe_layer_recompute, dispatch, experts and combine are; "block": `router.recompute` around every block.
        device: whose kernels; "cpu" or "cuda".
    """
    tokens, hidden = batch.tokens(layout), config.hidden_size
    total = head_bytes(config, layout, batch, device)
    for block, is_moe, number in block_kinds(config):
        if recompute == "block":
            kept: float = tokens * hidden * config.params_dtype.itemsize
            kept += tokens * config.moe_router_topk * INDEX_BYTES if is_moe else 0  # the routing
        else:
            load = expert_load(block, layout, batch) if is_moe else None
            block = _recomputing_mlp(block) if recompute == "mlp" else block
            kept = _block_bytes(block, layout, batch, load, device, keeps_experts=recompute != "layer")
        total += number * kept
    return total


def recomputed_bytes(
    config: TransformerConfig,
    layout: Layout,
    batch: Batch,
    recompute: Recompute,
) -> float:
    """Return what the block that is recomputed in backward keeps once more, the largest one's."""
    if recompute == "none":
        return 0.0
    largest = 0.0
    for block, is_moe, _ in block_kinds(config):
        load = expert_load(block, layout, batch) if is_moe else None
        if recompute == "block":
            largest = max(largest, _block_bytes(block, layout, batch, load, CUDA, keeps_experts=True))
        elif load is not None and recompute == "mlp":
            largest = max(largest, _first_bytes(replace(block, moe_recompute=None), layout, load))
        elif load is not None:
            largest = max(largest, _expert_path_bytes(block, layout, batch, load, CUDA))
    return largest


def _recomputing_mlp(config: TransformerConfig) -> TransformerConfig:
    """Return the same with the first product of experts made again in backward."""
    return replace(config, moe_recompute="mlp", activation_func_fp8_input_store=False)


def dense_width(config: TransformerConfig) -> int:
    """Return the width of a dense block's MLP."""
    return config.ffn_hidden_size or 4 * config.hidden_size


def head_bytes(config: TransformerConfig, layout: Layout, batch: Batch, device: torch.device) -> float:
    """Return what embedding, final norm, output layer and loss save."""
    tokens, value_bytes = batch.tokens(layout), config.params_dtype.itemsize
    whole, sum_bytes = tokens * layout.tp, sum_dtype(config.params_dtype).itemsize
    ids = 2 * INDEX_BYTES * whole  # embedding and targets
    logits = whole * config.vocab_size // layout.tp * (sum_bytes if layout.tp == 1 else value_bytes)
    of_loss = 0 if layout.tp == 1 else whole * (sum_bytes + 3)  # log-sums; which targets are here, valid, in the slice
    norm = _norm_bytes(config, tokens, device)
    return ids + norm + whole * config.hidden_size * value_bytes + logits + of_loss


def _block_bytes(
    config: TransformerConfig,
    layout: Layout,
    batch: Batch,
    load: Load | None,
    device: torch.device,
    *,
    keeps_experts: bool,
) -> float:
    """Return what one block saves; load is None for a dense one."""
    tokens, hidden = batch.tokens(layout), config.hidden_size
    value_bytes, inputs = config.params_dtype.itemsize, config.activation.num_inputs
    kept = 2 * _norm_bytes(config, tokens, device) + _attention_bytes(config, layout, batch)
    kept += tokens * hidden * value_bytes  # the input of router and experts, or of the dense MLP
    if load is None:
        return kept + tokens * inputs * dense_width(config) * value_bytes
    kept += _router_bytes(config, tokens, device)
    if keeps_experts:
        return kept + _expert_path_bytes(config, layout, batch, load, device)
    prob_bytes = ROUTER_DTYPES[config.moe_router_dtype].itemsize
    return kept + tokens * config.num_router_experts * (prob_bytes + 1)  # probs and map


def _norm_bytes(config: TransformerConfig, tokens: int, device: torch.device) -> int:
    """A fused kernel saves its input and 1 / rms; a CPU also the normalised input, both in the dtype of sums."""
    sum_bytes = sum_dtype(config.params_dtype).itemsize
    width = 2 * sum_bytes if device.type == "cpu" else config.params_dtype.itemsize
    return tokens * (config.hidden_size * width + sum_bytes)


def _attention_bytes(config: TransformerConfig, layout: Layout, batch: Batch) -> int:
    """Return what attention saves, as torch's flash kernels have it: q, k, v, their result, its log-sums.

    The value heads are a view of linear_qkv's output, which stays alive as a whole. linear_proj reads a copy of the
    result, its heads side by side.
    """
    whole, value_bytes = batch.tokens(layout) * layout.tp, config.params_dtype.itemsize
    heads = config.num_attention_heads // layout.tp
    groups = (config.num_query_groups or config.num_attention_heads) // layout.tp
    width, key_width = heads * config.head_size, groups * config.head_size
    of_token = config.hidden_size + (width + 2 * key_width) + width + key_width + 2 * width
    angles = 2 * batch.seq_length * config.head_size  # cos and sin [S, D / 2], for q and k
    log_sums = whole * heads * sum_dtype(config.params_dtype).itemsize
    return (whole * of_token + angles) * value_bytes + log_sums


def _router_bytes(config: TransformerConfig, tokens: int, device: torch.device) -> int:
    """Return what the router saves, its input apart: per token E or K values of w bytes each, and K ids."""
    width, topk = config.num_router_experts, config.moe_router_topk
    function, pre_softmax = config.moe_router_score_function, config.moe_router_pre_softmax
    has_aux, has_buffer = bool(config.aux_loss_coeffs), device.type == "cpu"
    is_fused, is_softmax = config.moe_router_fusion, function == "softmax"
    wide = narrow = bools = 0  # values [T, E], values [T, K], bools [T, E]
    if is_fused:
        ids = next(dtype.itemsize for limit, dtype in FEWEST_BYTES if width <= limit)
        wide, narrow = (1, 0) if pre_softmax else (0, 1 + (not is_softmax))
    else:
        ids, wide = INDEX_BYTES, 1  # logits, or all scores
        if function == "sqrtsoftplus":
            narrow = 3 if topk == 1 else 4
        else:
            narrow = 0 if pre_softmax else 1 if is_softmax or topk == 1 else 2 + has_buffer
    needs_logits = bool(config.moe_z_loss_coeff) or (has_aux and not is_softmax)
    wide += int(needs_logits and (is_fused or pre_softmax))
    if has_aux:
        wide += 1  # normalised scores
        if not is_fused:
            wide += {"softmax": 0, "sigmoid": int(has_buffer), "sqrtsoftplus": 2}[function]
            bools += function == "sqrtsoftplus"
    of_token = ids * topk + ROUTER_DTYPES[config.moe_router_dtype].itemsize * (wide * width + narrow * topk)
    of_token += bools * width + (4 if config.moe_z_loss_coeff else 0)
    return tokens * of_token


def _expert_path_bytes(
    config: TransformerConfig, layout: Layout, batch: Batch, load: Load, device: torch.device
) -> float:
    """Return what dispatch, experts, combine, the shared expert and latent projections save."""
    tokens, value_bytes = batch.tokens(layout), config.params_dtype.itemsize
    kept = _index_bytes(config, layout, load) + _experts_bytes(config, layout, load)
    kept += ROUTER_DTYPES[config.moe_router_dtype].itemsize * load.slots  # probs
    casts = gemm_dtype(config.params_dtype, device) if device.type == "cpu" else config.params_dtype
    if config.moe_latent_size is not None:
        kept += tokens * config.moe_latent_size * casts.itemsize  # fc2_latent_proj's input
        if casts != config.params_dtype:
            kept += (tokens * config.hidden_size + 2 * config.hidden_size * config.moe_latent_size) * casts.itemsize
        if layout.tp_ep == 1:
            kept += tokens * config.moe_latent_size * value_bytes
    if config.moe_shared_expert_intermediate_size is not None:
        width = config.activation.num_inputs * config.moe_shared_expert_intermediate_size
        kept += tokens * width * value_bytes
        if config.moe_shared_expert_gate:
            wide = sum_dtype(config.params_dtype).itemsize
            kept += tokens * wide + (tokens * config.hidden_size * wide if wide != value_bytes else 0)
    return kept


def _index_bytes(config: TransformerConfig, layout: Layout, load: Load) -> float:
    """Return the bytes of the int64 indices of dispatch and experts."""
    padded = load.real_slots + load.slots if load.slots != load.real_slots else 0  # places of slots; row_ids with -1
    if layout.tp_ep == 1:
        per_slot = 2 * load.real_slots if not padded else load.real_slots  # slot_probs, row_ids
    elif config.dispatcher_name == "alltoall":
        per_slot = 2 * load.rows_sent + load.real_slots
    elif config.dispatcher_name == "allgather":
        per_slot = 2 * load.real_slots
    else:  # row_ids; slot_probs and places there; the same here
        per_slot = load.rows_sent + load.real_slots + 3 * load.real_slots
    return INDEX_BYTES * (per_slot + padded)


def _experts_bytes(config: TransformerConfig, layout: Layout, load: Load) -> float:
    """Return the bytes of the rows and of the activation's input."""
    value_bytes, hidden = config.params_dtype.itemsize, config.expert_hidden_size
    rows = load.rows * hidden * value_bytes if layout.tp_ep > 1 else 0.0  # one rank: the layer's own input
    recipe = config.quantization
    if recipe is not None and config.fp8_wgrad and config.first_gemm != "recompute":
        codes = load.slots * hidden * recipe.bits / 8
        if codes < load.rows * hidden * value_bytes:
            per_scale = recipe.block.cols
            scales = codes * 8 / recipe.bits / per_scale * SCALE_BYTES[recipe.scale_format] if per_scale else 0.0
            rows = codes + scales
    return rows + _first_bytes(config, layout, load)


def _first_bytes(config: TransformerConfig, layout: Layout, load: Load) -> float:
    """Return the bytes of the first product's output, which the activation reads."""
    width = config.activation.num_inputs * config.moe_ffn_hidden_size // layout.etp
    if config.first_gemm == "recompute":
        return 0.0
    if config.first_gemm == "fp8":
        return load.slots * (width + 4 * (width // STORED_BLOCK if width % STORED_BLOCK == 0 else 1))
    return load.slots * width * config.params_dtype.itemsize
