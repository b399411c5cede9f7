"""Which layouts of a number of GPUs a model fits in, what each needs and sends, and which to try first.

    python -m moe.plan --world-size 64 --gpu-memory-gb 80 --bf16 --seq-length 4096 --micro-batch-size 1 \
        --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --vocab-size 32000 \
        --num-experts 8 --moe-ffn-hidden-size 14336 --moe-router-topk 2

Everything is computed by formula (docs/memory.md): no GPU, no torch.distributed, no model is built. All flags of the
model are those of TransformerConfig. TP > 1 means sequence parallelism too; CP is 1. A factoring is listed with the
least recomputation that fits: none, mlp (--moe-recompute mlp), layer (--moe-layer-recompute) or block (`recompute`
around each block). The estimate counts what differs between layouts alone: bytes sent, over the given speeds, and what
is computed again; nothing overlaps. Use it to choose what to measure, not instead of measuring.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from moe.arguments import add_config_arguments, config_from_args
from moe.config import TransformerConfig
from moe.layout import Batch, Layout, block_kinds, expert_load, faults
from moe.memory import Memory, memory_of
from moe.saved_bytes import RECOMPUTE_MODES, Recompute, dense_width
from moe.traffic import KINDS, share_across_nodes, traffic_of

GIB = 1 << 30
COLUMNS = (
    "TP|EP|ETP|DP|EDP|FSDP|recompute|weights|grads|optim|activ|work|comm|total|worst|dispatch|combine|gradients|params"
    "|TP|ms|why"
)
FIXED = {"tp": "tensor_model_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan is for.

    Attributes:
        world_size: GPUs.
        gpus_per_node: of a node; consecutive ranks.
        memory_gib: of a GPU.
        reserved_gib: of it for CUDA, NCCL and fragmentation.
        inside_gbs, across_gbs: 10^9 bytes that a GPU sends in a second inside a node, and to other nodes.
        tflops: 10^12 operations of a GPU in a second in matrix products, as measured, not as advertised.
    """

    world_size: int
    gpus_per_node: int
    memory_gib: float
    reserved_gib: float
    inside_gbs: float
    across_gbs: float
    tflops: float

    @property
    def usable_bytes(self) -> float:
        """Of a GPU, after what is reserved."""
        return (self.memory_gib - self.reserved_gib) * GIB


@dataclass(frozen=True)
class Candidate:
    """A layout with one mode of recomputation.

    Attributes:
        layout, recompute: what it is.
        memory: of a rank with the assumed load.
        worst: total bytes if all tokens choose experts of one rank.
        missing: bytes that it needs beyond the GPU's; 0 if it fits.
        sent: bytes of a step by kind.
        across: those of them that leave the node.
        seconds: of a step, for sending and recomputing alone.
        recompute_seconds: those of them for recomputing.
        reason: why it stands where it does.
    """

    layout: Layout
    recompute: Recompute
    memory: Memory
    worst: float
    missing: float
    sent: dict[str, float]
    across: float
    seconds: float
    recompute_seconds: float
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it as numbers and texts, sizes in bytes."""
        layout = asdict(self.layout) | {"cp": 1, "dp": self.layout.dp, "edp": self.layout.edp}
        memory = asdict(self.memory) | {"total": self.memory.total, "worst_case_total": self.worst}
        return {
            "layout": layout,
            "recompute": self.recompute,
            "memory_bytes": {name: round(value) for name, value in memory.items()},
            "missing_bytes": round(self.missing),
            "sent_bytes_per_step": {kind: round(value) for kind, value in self.sent.items()},
            "sent_to_other_nodes_bytes_per_step": round(self.across),
            "seconds_per_step": self.seconds,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Attributes:
        fitting: best first.
        too_large: layouts that lack memory in every mode of recomputation, the one that lacks least first.
        refused: why other sizes cannot be, each sentence once.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[str, ...]


def plan(
    config: TransformerConfig,
    machine: Machine,
    batch: Batch,
    global_batch_size: int | None = None,
    *,
    optimizer_bytes_per_parameter: float | None = None,
    sizes: dict[str, int] | None = None,
) -> Plan:
    """Return every layout of the machine's ranks, each with the first mode of recomputation that fits.

    Args:
        config: the model. With moe_layer_recompute or moe_recompute its MoE layers recompute in every layout.
        machine: what it shall run on.
        batch: of a rank; its num_microbatches follows from the global batch.
        global_batch_size: sequences of a step over all ranks; None: micro_batch_size for each rank of the machine, so
            that layouts do the same work.
        optimizer_bytes_per_parameter: of another optimizer than torch's AdamW; see `optimizer_bytes`.
        sizes: fixed sizes among "tp", "ep", "etp" and "fsdp"; None: all are tried.
    """
    best: list[Candidate] = []
    too_large: list[Candidate] = []
    refused: dict[str, None] = {}
    total = global_batch_size or batch.micro_batch_size * machine.world_size
    each = {"optimizer_bytes_per_parameter": optimizer_bytes_per_parameter}
    modes = _modes(config)
    for layout in layouts(machine.world_size, sizes or {}):
        found = faults(config, layout, batch)
        share = batch.micro_batch_size * layout.dp
        if not found and total % share:
            found.append(
                f"global_batch_size ({total}) is not divisible by micro_batch_size"
                f" ({batch.micro_batch_size}) x DP ({layout.dp}) = {share}"
            )
        if found:
            refused.update(dict.fromkeys(found))
            continue
        steps = replace(batch, num_microbatches=total // share)
        needs = [memory_of(config, layout, steps, mode, **each).total for mode in modes]
        fitting = [mode for mode, need in zip(modes, needs, strict=True) if need <= machine.usable_bytes]
        chosen = fitting[0] if fitting else modes[needs.index(min(needs))]
        (best if fitting else too_large).append(judge(config, machine, layout, steps, chosen, **each))
    best.sort(key=lambda candidate: (candidate.seconds, candidate.memory.total))
    too_large.sort(key=lambda candidate: candidate.missing)
    ranked = (replace(c, reason=reason_of(c, best[0], machine)) for c in best)
    lacking = (replace(c, reason=_lack_of(c)) for c in too_large)
    return Plan(tuple(ranked), tuple(lacking), tuple(refused))


def layouts(world_size: int, sizes: dict[str, int]) -> Iterator[Layout]:
    """Yield the layouts of so many ranks, those with FSDP2 last; sizes as in `plan`."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]

    def choices(name: str) -> list[int]:
        return [sizes[name]] if name in sizes else divisors

    for fsdp in (False, True):
        if fsdp != sizes.get("fsdp", fsdp):
            continue
        for tp in choices("tp"):
            for ep in choices("ep"):
                for etp in choices("etp"):
                    layout = Layout(world_size=world_size, tp=tp, ep=ep, etp=etp, fsdp=fsdp)
                    is_given = "ep" in sizes and "etp" in sizes
                    if (layout.tp_ep <= world_size or is_given) and not (fsdp and layout.dp == layout.edp == 1):
                        yield layout


def _modes(config: TransformerConfig) -> tuple[Recompute, ...]:
    """Return the ways to recompute that go with what the config asks for, the least first."""
    if config.moe_layer_recompute:
        return ("layer",)
    return ("mlp", "block") if config.moe_recompute == "mlp" else RECOMPUTE_MODES


def judge(
    config: TransformerConfig,
    machine: Machine,
    layout: Layout,
    batch: Batch,
    recompute: Recompute,
    *,
    optimizer_bytes_per_parameter: float | None = None,
) -> Candidate:
    """Return what a layout needs, sends and takes."""
    each = {"optimizer_bytes_per_parameter": optimizer_bytes_per_parameter}
    memory = memory_of(config, layout, batch, recompute, **each)
    worst = memory_of(config, layout, replace(batch, imbalance=math.inf), recompute, **each).total
    traffic = traffic_of(config, layout, batch, recompute)
    sent = dict.fromkeys(KINDS, 0.0)
    across = seconds = 0.0
    for part in traffic:
        leaving = part.bytes * share_across_nodes(part, layout, machine.gpus_per_node)
        sent[part.kind] += part.bytes
        across += leaving
        seconds += leaving / (machine.across_gbs * 1e9) + (part.bytes - leaving) / (machine.inside_gbs * 1e9)
    again = recomputed_operations(config, layout, batch, recompute) / (machine.tflops * 1e12)
    missing = max(0.0, memory.total - machine.usable_bytes)
    return Candidate(layout, recompute, memory, worst, missing, sent, across, seconds + again, again)


def recomputed_operations(config: TransformerConfig, layout: Layout, batch: Batch, recompute: Recompute) -> float:
    """Return the additions and multiplications in matrix products that a rank repeats in a step."""
    if recompute == "none":
        return 0.0
    tokens, total, hidden = batch.tokens(layout), 0.0, config.hidden_size
    for block, is_moe, number in block_kinds(config):
        products = 1 + block.activation.num_inputs
        values = 0.0  # multiplications
        if is_moe:
            load = expert_load(block, layout, replace(batch, imbalance=1.0))
            ffn = block.moe_ffn_hidden_size // layout.etp
            if recompute == "mlp":
                products = block.activation.num_inputs
            values += load.slots * products * ffn * block.expert_hidden_size
        if is_moe and recompute != "mlp":
            values += tokens * products * (block.moe_shared_expert_intermediate_size or 0) * hidden
        elif not is_moe and recompute == "block":
            values += tokens * products * dense_width(block) * hidden
        if recompute == "block":
            width = block.num_attention_heads * block.head_size
            key_width = (block.num_query_groups or block.num_attention_heads) * block.head_size
            values += tokens * hidden * (2 * width + 2 * key_width) + tokens * batch.seq_length * width
        total += 2 * number * values
    return batch.num_microbatches * total


def reason_of(candidate: Candidate, best: Candidate, machine: Machine) -> str:
    """Return in words why a layout that fits stands where it does."""
    layout, parts = candidate.layout, []
    if candidate.seconds <= best.seconds:
        parts.append("fits, shortest estimate")
    else:
        why = "recomputes more" if _recomputes_most(candidate, best) else f"sends more: {_grown_kind(candidate, best)}"
        parts.append(f"fits, {why}")
    for name, size in (("EP x ETP", layout.tp_ep), ("TP", layout.tp)):
        if size > 1:
            nodes = -(-size // machine.gpus_per_node)
            parts.append(f"{name} inside the node" if nodes == 1 else f"{name} over {nodes} nodes")
    if candidate.recompute != "none":
        parts.append(f"recomputes each {candidate.recompute} to fit")
    if candidate.worst > machine.usable_bytes:
        parts.append("would not fit with all tokens on one rank")
    return "; ".join(parts)


def _recomputes_most(candidate: Candidate, best: Candidate) -> bool:
    """Whether recomputation makes up most of what it takes longer than the best."""
    return candidate.recompute_seconds - best.recompute_seconds > (candidate.seconds - best.seconds) / 2


def _grown_kind(candidate: Candidate, best: Candidate) -> str:
    """Return the kind of traffic that grew most over the best layout's, or that more leaves the node."""
    grown = {kind: candidate.sent[kind] - best.sent[kind] for kind in KINDS}
    kind = max(grown, key=lambda name: grown[name])
    if candidate.across > best.across and grown[kind] <= candidate.across - best.across:
        return "between nodes"
    return kind


def _lack_of(candidate: Candidate) -> str:
    """Return in words what a layout lacks, and what takes most."""
    sizes = asdict(candidate.memory)
    largest = max(sizes, key=lambda name: sizes[name])
    return f"out of memory by {candidate.missing / GIB:.1f} GiB; largest: {largest}, {sizes[largest] / GIB:.1f} GiB"


def table_of(candidates: Sequence[Candidate]) -> list[str]:
    """Return aligned lines: sizes, GiB of a rank, 10^9 bytes sent in a step, the estimate, why."""
    lines = [COLUMNS.split("|")]
    for c in candidates:
        layout, memory = c.layout, asdict(c.memory)
        cells = [str(getattr(layout, name)) for name in ("tp", "ep", "etp", "dp", "edp")]
        cells += ["yes" if layout.fsdp else "no", c.recompute]
        cells += [f"{size / GIB:.1f}" for size in (*memory.values(), c.memory.total, c.worst)]
        cells += [f"{c.sent[kind] / 1e9:.2f}" for kind in KINDS]
        lines.append([*cells, f"{1e3 * c.seconds:.0f}", c.reason])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)) + "  " + line[-1]
        for line in lines
    ]


def text_of(found: Plan, machine: Machine, num_rows: int) -> str:
    """Return the plan as text for a terminal."""
    usable = machine.usable_bytes / GIB
    lines = [f"{len(found.fitting)} layouts of {machine.world_size} GPUs fit {usable:g} GiB a GPU, best first."]
    if found.fitting:
        lines += ["Memory in GiB a rank, sent in 10^9 bytes a rank and step, ms: sending and recomputing alone."]
        lines += ["", *table_of(found.fitting[:num_rows]), *_left_out(len(found.fitting), num_rows)]
        lines += ["", f"Flags of the first: {flags_of(found.fitting[0])}"]
    if found.too_large:
        lines += ["", f"{len(found.too_large)} layouts lack memory, whatever is recomputed:"]
        lines += ["", *table_of(found.too_large[:num_rows]), *_left_out(len(found.too_large), num_rows)]
    if found.refused:
        lines += ["", "Not possible:", *(f"- {text}" for text in found.refused[: 2 * num_rows])]
        lines += _left_out(len(found.refused), 2 * num_rows)
    return "\n".join(lines)


def _left_out(number: int, shown: int) -> list[str]:
    """Return a line that says how many more there are, if there are."""
    return [f"... and {number - shown} more (--max-rows)"] if number > shown else []


def flags_of(candidate: Candidate) -> str:
    """Return the flags of examples/pretrain_gpt.py for a layout, and what is asked for in code."""
    layout = candidate.layout
    sizes = {name: getattr(layout, key) for key, name in FIXED.items() if getattr(layout, key) > 1}
    flags = [f"--{name.replace('_', '-')} {size}" for name, size in sizes.items()]
    flags += ["--sequence-parallel"] if layout.tp > 1 else []
    flags += {"mlp": ["--moe-recompute", "mlp"], "layer": ["--moe-layer-recompute"]}.get(candidate.recompute, [])
    flags += ["--use-torch-fsdp2"] if layout.fsdp else []
    in_code = "; in code: recompute(block, hidden_states)" if candidate.recompute == "block" else ""
    return " ".join(flags or ["none"]) + in_code


class _Parser(argparse.ArgumentParser):
    """Says how to go on."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"moe.plan: {message.rstrip('.')}; --help lists the flags.\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the machine, the step, and the flags of the model."""
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m moe.plan", description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument_group("machine").add_argument
    add("--world-size", type=int, required=True, help="GPUs in all")
    add("--gpu-memory-gb", type=float, required=True, help="memory of a GPU, in GiB: 80 for an H100")
    add("--gpus-per-node", type=int, default=8, help="consecutive ranks of a node (8)")
    add("--reserved-gb", type=float, default=4.0, help="GiB for CUDA, NCCL and fragmentation (4)")
    add("--inside-gbs", type=float, default=300.0, help="10^9 bytes/s that a GPU sends inside a node (300)")
    add("--across-gbs", type=float, default=40.0, help="10^9 bytes/s that a GPU sends to other nodes (40)")
    add("--tflops", type=float, default=400.0, help="10^12 operations/s of a GPU in matrix products (400)")
    add = parser.add_argument_group("step").add_argument
    add("--seq-length", type=int, required=True, help="S, tokens of a sequence")
    add("--micro-batch-size", type=int, default=1, help="B, sequences of a rank in one forward (1)")
    add("--global-batch-size", type=int, help="sequences of a step over all ranks; default: B x GPUs")
    add("--load-imbalance", type=float, default=1.0, help="slots of the fullest rank over the mean (1: even)")
    add(
        "--optimizer-bytes",
        type=float,
        help="of a parameter; default: AdamW, two moments of its dtype. 12 with --bf16: fp32 masters too",
    )
    add = parser.add_argument_group("layout: what is given is fixed, the rest is searched").add_argument
    for key, name in FIXED.items():
        add(f"--{name.replace('_', '-')}", type=int, dest=key, help=key.upper())
    add("--fsdp", action=argparse.BooleanOptionalAction, help="with or without FSDP2 alone")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print JSON, sizes in bytes")
    add("--max-rows", type=int, default=12, help="layouts that are shown of each table (12)")
    add_config_arguments(parser, TransformerConfig)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag out of range."""
    limits = {"load_imbalance": 1.0, "reserved_gb": 0.0, "optimizer_bytes": 0.0}
    counts = ("world_size", "gpus_per_node", "seq_length", "micro_batch_size", "global_batch_size", "max_rows", *FIXED)
    limits |= dict.fromkeys(counts, 1.0)
    for name, lowest in limits.items():
        value = getattr(args, name)
        if value is not None and not lowest <= value < math.inf:
            flag = FIXED.get(name, name).replace("_", "-")
            raise ValueError(f"--{flag} ({value}) must be a finite number and at least {lowest:g}.")
    for name in ("gpu_memory_gb", "inside_gbs", "across_gbs", "tflops"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} ({getattr(args, name)}) must be a finite number above 0.")
    if args.reserved_gb >= args.gpu_memory_gb:
        raise ValueError(f"--reserved-gb ({args.reserved_gb}) must be below --gpu-memory-gb ({args.gpu_memory_gb}).")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the flags, print the plan, and exit with 1 if nothing fits, with 2 for flags that contradict."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    try:
        check_arguments(args)
        config = config_from_args(args, TransformerConfig)
    except ValueError as error:
        parser.error(str(error))
    machine = Machine(
        world_size=args.world_size,
        gpus_per_node=args.gpus_per_node,
        memory_gib=args.gpu_memory_gb,
        reserved_gib=args.reserved_gb,
        inside_gbs=args.inside_gbs,
        across_gbs=args.across_gbs,
        tflops=args.tflops,
    )
    batch = Batch(seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, imbalance=args.load_imbalance)
    sizes = {name: getattr(args, name) for name in (*FIXED, "fsdp") if getattr(args, name) is not None}
    each = args.optimizer_bytes
    found = plan(config, machine, batch, args.global_batch_size, optimizer_bytes_per_parameter=each, sizes=sizes)
    if args.json:
        lists = {name: [c.as_dict() for c in getattr(found, name)] for name in ("fitting", "too_large")}
        print(json.dumps({"machine": asdict(machine), **lists, "refused": found.refused}, indent=1))
    else:
        print(text_of(found, machine, args.max_rows))
    if not found.fitting:
        sys.exit(1)


if __name__ == "__main__":
    main()
