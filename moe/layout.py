"""How ranks are laid out and what a step is made of: the inputs of memory and traffic formulas, without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dispatchers.wire import mean_targets
from moe.backends import check_width
from moe.config import TransformerConfig
from router.capacity import slots_of_expert


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One factoring of the ranks; CP is 1.

    Attributes:
        world_size: W, all ranks.
        tp, ep, etp: sizes of tensor, expert and expert-tensor parallelism.
        fsdp: whether `apply_fsdp` shards parameters, gradients and optimizer state.
    """

    world_size: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    fsdp: bool = False

    @property
    def dp(self) -> int:
        """DP, ranks with other sequences."""
        return self.world_size // self.tp

    @property
    def edp(self) -> int:
        """EDP, ranks that hold the same experts."""
        return self.world_size // (self.ep * self.etp)

    @property
    def tp_ep(self) -> int:
        """n = EP x ETP, ranks between which tokens travel."""
        return self.ep * self.etp

    def group(self, name: str) -> tuple[int, int]:
        """Return distance between neighbours and size of a group, named as in ProcessGroups."""
        groups = {
            "tp": (1, self.tp),
            "dp": (self.tp, self.dp),
            "etp": (1, self.etp),
            "ep": (self.etp, self.ep),
            "tp_ep": (1, self.tp_ep),
            "edp": (self.tp_ep, self.edp),
            "world": (1, self.world_size),
        }
        return groups[name]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a rank computes in a step.

    Attributes:
        seq_length: S.
        micro_batch_size: B, sequences of a micro-batch.
        num_microbatches: forwards and backwards of a step.
        imbalance: slots of the fullest rank's experts over the mean; infinity: all tokens choose experts of this rank.
    """

    seq_length: int
    micro_batch_size: int
    num_microbatches: int = 1
    imbalance: float = 1.0

    def tokens(self, layout: Layout) -> int:
        """T = S * B / TP, tokens of a micro-batch on this rank outside attention."""
        return self.seq_length * self.micro_batch_size // layout.tp


@dataclass(frozen=True)
class Load:
    """What the experts of a rank get of one micro-batch.

    Attributes:
        rows: R, rows after dispatch.
        slots: M, with padding.
        real_slots: M without padding.
        rows_sent: rows that this rank sends, those to itself included.
    """

    rows: float
    slots: float
    real_slots: float
    rows_sent: float


def faults(config: TransformerConfig, layout: Layout, batch: Batch) -> list[str]:
    """Return why a model cannot run in this layout, a sentence each; memory apart."""
    tp, ep, etp, found = layout.tp, layout.ep, layout.etp, []
    heads = "num_query_groups" if config.num_query_groups else "num_attention_heads"
    wide = config.moe_ffn_hidden_size
    rules = [
        (heads, config.num_query_groups or config.num_attention_heads, "TP", tp),
        ("vocab_size", config.vocab_size, "TP", tp),
        ("seq_length", batch.seq_length, "TP", tp),
        ("num_moe_experts", config.num_moe_experts, "EP", ep),
        ("moe_ffn_hidden_size", wide, "ETP", etp),
        ("world_size", layout.world_size, "TP", tp),
        ("world_size", layout.world_size, "EP x ETP", layout.tp_ep),
    ]
    if config.add_bias_linear:
        rules.append(("hidden size of the experts", config.expert_hidden_size, "ETP", etp))
    found += [
        f"{name} ({value}) is not divisible by {axis} ({size})" for name, value, axis, size in rules if value % size
    ]
    if config.quantization is not None and wide % etp == 0:
        found += _refusal(
            lambda: check_width(
                f"moe_ffn_hidden_size ({wide}) / ETP ({etp})",
                wide // etp,
                config.quantization.width_multiple if config.quantization else 1,
                f"recipe {config.quantization_name!r}",
            )
        )
        if config.fp8_param and etp > 1 and config.quantization.weight_block.rows is None:
            found.append(f"fp8_param with recipe {config.quantization_name!r} needs ETP 1, not {etp}")
    node_size = config.moe_dispatch_node_size
    if node_size is not None and layout.tp_ep > 1 and (layout.tp_ep % node_size or node_size % etp):
        found.append(
            f"moe_dispatch_node_size ({node_size}) must divide EP x ETP ({layout.tp_ep}) and be a multiple of ETP"
        )
    if layout.fsdp and config.fp8_param:
        found.append("apply_fsdp does not take fp8_param")
    return found


def _refusal(check: Callable[[], None]) -> list[str]:
    """Return what a check raises, as a list of one or no sentence."""
    try:
        check()
    except ValueError as error:
        return [str(error).rstrip(".")]
    return []


def block_kinds(config: TransformerConfig) -> list[tuple[TransformerConfig, bool, int]]:
    """Return the kinds of blocks: their settings, whether they are MoE, and how many there are."""
    number, freq = config.num_layers, config.moe_layer_freq
    is_moe = [index % freq == 0 for index in range(number)] if isinstance(freq, int) else map(bool, freq)
    start, end = config.num_layers_at_start_in_bf16, number - config.num_layers_at_end_in_bf16
    is_at_end = [config.first_last_layers_bf16 and not start <= index < end for index in range(number)]
    counts = Counter(zip(is_at_end, is_moe, strict=True))
    settings = {at_end: config.of_block(is_at_end.index(at_end)) for at_end in set(is_at_end)}
    return [(settings[at_end], moe, count) for (at_end, moe), count in counts.items()]


def num_nodes_of_dispatch(config: TransformerConfig, layout: Layout) -> int:
    """Return the nodes between which the deduplicated dispatcher sends first, 1 without a second level."""
    return 1 if config.moe_dispatch_node_size is None else max(1, layout.tp_ep // config.moe_dispatch_node_size)


def choices_per_token(config: TransformerConfig) -> float:
    """K, the experts of a token that are real ones when choices are even."""
    return config.moe_router_topk * config.num_moe_experts / config.num_router_experts


def capacity(config: TransformerConfig, num_tokens: int) -> int | None:
    """Return C, the most slots of an expert for one rank's tokens; None without a capacity."""
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return None
    counted = config.moe_expert_capacity_tokens or num_tokens
    return slots_of_expert(counted, config.moe_router_topk, config.num_moe_experts, factor)


def expert_load(config: TransformerConfig, layout: Layout, batch: Batch) -> Load:
    """Return what the experts of the fullest rank get of a MoE block; at most n * T * min(K, L) slots."""
    tokens, ranks = batch.tokens(layout), layout.tp_ep
    num_local, topk = config.num_moe_experts // layout.ep, choices_per_token(config)
    most = ranks * tokens * min(config.moe_router_topk, num_local)
    limit = capacity(config, tokens)
    sent = tokens * topk
    if limit is not None:
        most, sent = min(most, ranks * num_local * limit), min(sent, config.num_moe_experts * limit)
    real = min(layout.etp * tokens * topk * batch.imbalance, most)
    if config.has_static_shapes and limit is not None:
        limit += -limit % config.pad_multiple
        real, sent = ranks * num_local * limit, config.num_moe_experts * limit
    rows: float = tokens
    if ranks > 1 and config.dispatcher_name == "allgather":
        rows = ranks * tokens
    elif ranks > 1 and config.dispatcher_name == "alltoall":
        rows = real
    elif ranks > 1:
        sent = layout.etp * tokens * mean_targets(config.num_moe_experts, config.moe_router_topk, layout.ep)
        rows = min(ranks * tokens, sent * batch.imbalance)
    return Load(rows, _padded(real, num_local, config.pad_multiple), real, sent)


def _padded(slots: float, num_local: int, multiple: int) -> float:
    """Return the slots of L experts with equal counts, each padded up to a multiple and by half of one at least."""
    if multiple == 1:
        return slots
    each = slots / num_local
    return num_local * max(-(-each // multiple) * multiple, each + (multiple - 1) / 2)
