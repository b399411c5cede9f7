"""Memory of a rank by formula: parameters, gradients, optimizer state, activations, buffers.

docs/memory.md states the formulas. Legend: `S` sequence, `B` micro-batch, `N` = S * B, `T` = N / TP, `H` hidden, `F`
expert width, `E` experts, `L` = E / EP, `K` top-k, `R` rows after dispatch, `M` expert slots, `V` vocabulary, `G` 2 for
gated units else 1, `p` bytes of a parameter's value, `w` bytes of a sum's (4, or 8 for fp64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dispatchers.permutation import sum_dtype
from moe.config import TransformerConfig
from moe.gradients import BUCKET_ELEMENTS
from moe.layout import Batch, Layout, block_kinds, expert_load
from moe.saved_bytes import Recompute, dense_width, recomputed_bytes, saved_bytes

FP8_STATE_BYTES = 12  # fp32 master and two moments of a weight that is stored in FP8


@dataclass(frozen=True)
class Weight:
    """Parameters of one shape.

    Attributes:
        unit: which FSDP2 unit gathers them: "root", "block" or "experts".
        placement: "replicated", "tp" (sharded over TP) or "expert".
        shape: on this rank, before FSDP2.
        number: how many of them a rank holds.
        itemsize: bytes of a value.
        scales: bytes of the scales of one, of a weight stored in FP8.
    """

    unit: str
    placement: str
    shape: tuple[int, ...]
    number: int
    itemsize: int
    scales: int = 0

    def num_kept(self, layout: Layout) -> int:
        """Return the values of one that a rank keeps: all of it, or its shard, those of the first rank."""
        numel = math.prod(self.shape)
        if not layout.fsdp:
            return numel
        num_shards = layout.edp if self.placement == "expert" else layout.dp
        if self.placement == "expert" and num_shards > self.shape[0] and len(self.shape) > 2:
            hidden = self.shape[3 if len(self.shape) == 4 else 1]
            if hidden % num_shards == 0:  # as apply_fsdp cuts them: along H
                return numel // num_shards
        return numel // self.shape[0] * -(-self.shape[0] // num_shards)

    @property
    def numel(self) -> int:
        """Values of all of them, whole."""
        return self.number * math.prod(self.shape)

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of a gradient's value: fp32 for a weight stored in FP8."""
        return 4 if self.itemsize == 1 else self.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights, gradients, optimizer: of the parameters.
        activations: saved for backward at the end of a micro-batch's forward.
        working: what else is alive at the fullest moment: recomputed activations, gradients of activations or logits.
        communication: rows sent and received, gradient buckets, parameters that FSDP2 has gathered.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    communication: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())


def weights_of(config: TransformerConfig, layout: Layout) -> list[Weight]:
    """Return the parameters that a rank holds, by shape."""
    p, tp = config.params_dtype.itemsize, layout.tp
    vocabulary = (config.vocab_size // tp, config.hidden_size)
    found = [Weight("root", "tp", vocabulary, 2, p), Weight("root", "replicated", (config.hidden_size,), 1, p)]
    for block, is_moe, number in block_kinds(config):
        found += _block_weights(block, is_moe, layout, number)
    return found


def _block_weights(config: TransformerConfig, is_moe: bool, layout: Layout, number: int) -> list[Weight]:
    """Return the parameters of `number` equal blocks."""
    shapes = [*_attention_shapes(config, layout.tp), *(_moe_shapes(config) if is_moe else _dense_shapes(config))]
    dense = [Weight("block", placement, shape, number, config.params_dtype.itemsize) for placement, shape in shapes]
    return dense + (_expert_weights(config, layout, number) if is_moe else [])


def _attention_shapes(config: TransformerConfig, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield placement and shape of norms and attention."""
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_size
    groups = config.num_query_groups or config.num_attention_heads
    qkv = (width + 2 * groups * config.head_size) // tp
    yield from 2 * [("replicated", (hidden,))]
    yield "tp", (qkv, hidden)
    yield "tp", (hidden, width // tp)
    if config.add_bias_linear:
        yield from (("tp", (qkv,)), ("tp", (hidden,)))


def _mlp_shapes(config: TransformerConfig, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield placement and shape of an MLP of this width; every rank of TP has all of it."""
    inputs, hidden = config.activation.num_inputs, config.hidden_size
    yield from (("replicated", (inputs, width, hidden)), ("replicated", (hidden, width)))
    if config.add_bias_linear:
        yield from (("replicated", (inputs, width)), ("replicated", (hidden,)))


def _dense_shapes(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield placement and shape of a dense block's MLP."""
    yield from _mlp_shapes(config, dense_width(config))


def _moe_shapes(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield placement and shape of a MoE layer's parameters, those of the experts apart."""
    hidden, num_experts = config.hidden_size, config.num_router_experts
    yield "replicated", (num_experts, hidden)
    if config.add_bias_linear:
        yield "replicated", (num_experts,)
    if config.moe_shared_expert_intermediate_size is not None:
        yield from _mlp_shapes(config, config.moe_shared_expert_intermediate_size)
        if config.moe_shared_expert_gate:
            yield "replicated", (1, hidden)
    if config.moe_latent_size is not None:
        yield from (("replicated", (config.moe_latent_size, hidden)), ("replicated", (hidden, config.moe_latent_size)))
    if number := config.moe_num_constant_experts:
        yield from (("replicated", (number, hidden)), ("replicated", (number, 2, hidden)))


def _expert_weights(config: TransformerConfig, layout: Layout, number: int) -> list[Weight]:
    """Return the experts' parameters of `number` layers."""
    num_local, hidden = config.num_moe_experts // layout.ep, config.expert_hidden_size
    ffn, inputs, p = (
        config.moe_ffn_hidden_size // layout.etp,
        config.activation.num_inputs,
        config.params_dtype.itemsize,
    )
    found = []
    shapes: tuple[tuple[int, ...], ...] = ((num_local, inputs, ffn, hidden), (num_local, hidden, ffn))
    for shape in shapes:
        recipe = config.quantization if config.fp8_param else None
        scales = 0
        if recipe is not None:
            rows, cols = recipe.weight_block.sizes((shape[-2], shape[-1]))
            blocks = math.prod(shape[1:]) // (rows * cols) if recipe.weight_block.rows is not None else 1
            scales = 4 * num_local * blocks
        found.append(Weight("experts", "expert", shape, number, p if recipe is None else 1, scales))
    if config.add_bias_linear:
        for bias_shape in ((num_local, inputs, ffn), (num_local, hidden // layout.etp)):
            found.append(Weight("experts", "expert", bias_shape, number, p))
    return found


def parameter_bytes(weights: Sequence[Weight], layout: Layout) -> int:
    """Return the bytes of the parameters that a rank keeps, scales of FP8 weights included."""
    return sum(weight.number * (weight.num_kept(layout) * weight.itemsize + weight.scales) for weight in weights)


def gradient_bytes(weights: Sequence[Weight], layout: Layout) -> int:
    """Return the bytes of the gradients that a rank keeps until the optimizer's step."""
    return sum(weight.number * weight.num_kept(layout) * weight.gradient_itemsize for weight in weights)


def optimizer_bytes(weights: Sequence[Weight], layout: Layout, bytes_per_parameter: float | None = None) -> float:
    """Return the bytes of the optimizer's state.

    Args:
        weights, layout: what `weights_of` returned for these ranks.
        bytes_per_parameter: of another optimizer; None: torch's AdamW, whose two moments have the dtype of the
            parameter, with an fp32 master and fp32 moments for a weight stored in FP8 (`MasterWeights`).
    """

    def of_one(weight: Weight) -> float:
        if bytes_per_parameter is not None:
            return bytes_per_parameter
        return FP8_STATE_BYTES if weight.itemsize == 1 else 2 * weight.itemsize

    return sum(w.number * w.num_kept(layout) * of_one(w) for w in weights)


def memory_of(
    config: TransformerConfig,
    layout: Layout,
    batch: Batch,
    recompute: Recompute = "none",
    *,
    optimizer_bytes_per_parameter: float | None = None,
) -> Memory:
    """Return the memory of a rank on a GPU.

    Args:
        config: the model.
        layout: the ranks; a layout that `faults` has nothing against.
        batch: what a rank computes.
        recompute: see `saved_bytes`.
        optimizer_bytes_per_parameter: see `optimizer_bytes`.
    """
    weights = weights_of(config, layout)
    sum_bytes, value_bytes = sum_dtype(config.params_dtype).itemsize, config.params_dtype.itemsize
    logits = layout.tp * batch.tokens(layout) * config.vocab_size / layout.tp  # N * V / TP
    of_experts, travelling = 0.0, 0.0
    for block, is_moe, _ in block_kinds(config):
        if is_moe:
            load = expert_load(block, layout, batch)
            width = block.expert_hidden_size
            of_experts = max(of_experts, load.rows * width * (value_bytes + sum_bytes))
            if layout.tp_ep > 1:
                travelling = max(travelling, (load.rows_sent + load.rows) * width * value_bytes)
    recomputed = recomputed_bytes(config, layout, batch, recompute)
    return Memory(
        weights=parameter_bytes(weights, layout),
        gradients=gradient_bytes(weights, layout),
        optimizer=optimizer_bytes(weights, layout, optimizer_bytes_per_parameter),
        activations=saved_bytes(config, layout, batch, recompute),
        working=max(logits * (value_bytes + sum_bytes), recomputed + of_experts),
        communication=max(travelling, bucket_bytes(weights, layout, sum_bytes)) + gathered_bytes(config, layout),
    )


def bucket_bytes(weights: Sequence[Weight], layout: Layout, width: int) -> int:
    """Return the bytes of the largest buffer in which `finalize_gradients` sums: a bucket and its parts in fp32.

    A bucket is full once it has BUCKET_ELEMENTS values, so it ends with the parameter that filled it. width: bytes of a
    sum's value.
    """
    largest = 0
    for placement, ranks in reduced_over(layout).items():
        mine = [weight for weight in weights if weight.placement == placement]
        if mine and ranks > 1:
            kept = sum(weight.number * weight.num_kept(layout) for weight in mine)
            longest = max(weight.num_kept(layout) for weight in mine)
            largest = max(largest, min(kept, BUCKET_ELEMENTS + longest))
    return largest * width * (1 if all(weight.itemsize == width for weight in weights) else 2)


def reduced_over(layout: Layout) -> dict[str, int]:
    """Return by placement over how many ranks `finalize_gradients` sums, after what FSDP2 has summed."""
    if layout.fsdp:
        return {"replicated": layout.tp, "tp": 1, "expert": 1}
    return {"replicated": layout.world_size, "tp": layout.dp, "expert": layout.edp}


def gathered_bytes(config: TransformerConfig, layout: Layout) -> float:
    """Return the bytes that FSDP2 needs beside the shards.

    The root (embedding, final norm, output layer) is whole for all of a forward or backward; of the blocks the one in
    use and the next, which is gathered ahead, with the gradients of one and the buffer in which they are summed.
    """
    if not layout.fsdp:
        return 0.0
    root = sum(w.numel * w.itemsize for w in weights_of(config, layout) if w.unit == "root")
    widest = sum_dtype(config.params_dtype).itemsize / config.params_dtype.itemsize
    largest = 0.0
    for block, is_moe, _ in block_kinds(config):
        weights = _block_weights(block, is_moe, layout, 1)
        units = [sum(w.numel * w.itemsize for w in weights if w.unit == unit) for unit in ("block", "experts")]
        largest = max(largest, 3 * sum(units) + widest * max(units))
    return root + largest
