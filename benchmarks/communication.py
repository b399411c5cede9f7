"""What crosses ranks per token: rows and bytes of every dispatcher, measured on gloo ranks and computed from the maps.

Legend: `T` tokens of a rank, `H` hidden size, `E` experts, `L` local experts, `K` top-k, `n` ranks (EP). Rows are bf16,
probs fp32; routing is the top-k of the softmax of Gaussian logits, each rank with a seed of its own.

Each measured rank runs dispatch and combine forward and backward under a wiretap, which notes what torch.distributed
was given. Asserted on every rank: CommunicationCounter counted the same calls, rows and bytes; output and gradient are
those of experts that return prob * input. Asserted over all ranks: what `computed` derives from the routing maps equals
what was measured, to the byte for each pair of ranks; the deduplicated dispatcher sends one row for each distinct
(token, rank). EP 64 is computed alone.

Metadata is all that is no row: counts, expert ids, probs, maps. A reduce-scatter counts as what it is given: a rank's
addends for each rank.
"""

import argparse
import datetime
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.dispatcher_ranks import DISPATCHERS, PEERS, STAGES, Case, measure_all  # noqa: E402
from dispatchers.collectives import Payload  # noqa: E402
from dispatchers.wire import wire_format  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

RANK_COUNTS = [(4, "measured"), (8, "measured"), (64, "computed")]
TARGET_CASE = (64, 8, 8, 1024)  # E, K, EP, H
TARGETS = {"dispatch": 0.40, "dispatch + combine": 0.55}  # of alltoall's bytes, for deduplicated fp8
COLUMNS = (
    "E|EP|counts|dispatcher|dispatch rows|dispatch bytes|of them metadata|combine rows|combine bytes"
    "|dispatch of alltoall|dispatch + combine of alltoall|combine backward bytes|dispatch backward bytes"
)
Table = dict[str, Tensor]  # rows, row_bytes, metadata_bytes: [n, n] int64, from rank (line) to rank (column)


def draw_case(num_ranks: int, num_tokens: int, num_experts: int, topk: int, hidden_size: int, seed: int) -> Case:
    """Return a random routing: the top-k of Gaussian logits (softmax keeps their order), num_tokens on each rank."""
    maps = []
    for rank in range(num_ranks):
        logits = torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(10_000 * seed + rank))
        chosen = logits.topk(topk).indices
        maps.append(torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True))
    return Case(hidden_size=hidden_size, topk=topk, maps=tuple(maps))


def pairs_of_ranks(case: Case) -> tuple[Tensor, Tensor]:
    """Return [n, n] int64 twice, from rank (line) to rank: (token, expert) pairs, and distinct (token, rank) pairs."""
    num_ranks = len(case.maps)
    by_rank = [routing_map.view(routing_map.shape[0], num_ranks, -1) for routing_map in case.maps]  # [T, n, L]
    return torch.stack([m.sum((0, 2)) for m in by_rank]), torch.stack([m.any(-1).sum(0) for m in by_rank])


def computed(name: str, case: Case) -> dict[str, Table]:
    """Return what dispatcher `name` hands over in each stage, from the routing maps alone."""
    if name not in (*DISPATCHERS, *PEERS):
        raise ValueError(f"name ({name!r}) must be one of {[*DISPATCHERS, *PEERS]}.")
    num_ranks, num_experts, width = len(case.maps), case.num_experts, 2 * case.hidden_size
    pairs, distinct = pairs_of_ranks(case)  # [n, n]
    own_tokens = torch.tensor([m.shape[0] for m in case.maps]).unsqueeze(1).expand(num_ranks, num_ranks)
    own_name = name.removeprefix("megatron-core ").removesuffix(" fp8")
    payload: Payload = "fp8" if name.endswith(" fp8") else "plain"
    wire = wire_format(own_name, case.hidden_size, 2, num_experts, num_ranks, payload=payload)
    counts, beside, gradient, returned = wire.counts, wire.beside, wire.beside_gradient, wire.returned
    if own_name == "alltoall":
        rows, slots = pairs, pairs
    elif own_name == "deduplicated":
        rows, slots = distinct, pairs
    else:
        rows, slots = own_tokens, own_tokens
    if name == "megatron-core allgather":  # every expert's probs and map; no counts; sums in the dtype of probs
        counts, beside, gradient, returned = 0, (4 + 1) * num_experts, 4 * num_experts, 2 * width
    none = torch.zeros_like(rows)
    found = {
        "dispatch": (rows, wire.row, counts + beside * slots),
        "combine": (rows.t(), returned, none),
        "combine backward": (rows, returned, none),
        "dispatch backward": (rows.t(), width, gradient * slots.t()),
    }
    return {
        stage: {"rows": rows, "row_bytes": rows * row_bytes, "metadata_bytes": metadata}
        for stage, (rows, row_bytes, metadata) in found.items()
    }


def check_case(case: Case, by_rank: Sequence[dict[str, Any]]) -> None:
    """Assert that what the ranks measured is what `computed` says, and what deduplicated promises."""
    for name in by_rank[0]:
        expected = computed(name, case)
        for stage in STAGES:
            for figure, table in expected[stage].items():
                found = torch.tensor([lines[name][stage][figure] for lines in by_rank])
                assert torch.equal(found, table), (name, stage, figure, found.tolist(), table.tolist())
    num_local = case.num_experts // len(case.maps)
    for lines, routing_map in zip(by_rank, case.maps, strict=True):
        reached = {(token, expert // num_local) for token, expert in routing_map.nonzero().tolist()}
        assert sum(lines["deduplicated"]["dispatch"]["rows"]) == len(reached)


def figures_per_token(name: str, case: Case, *, only_others: bool) -> dict[str, Any]:
    """Return by stage what a dispatcher hands over per token, and its share of alltoall's bytes.

    only_others: leave out what a rank hands over for itself.
    """
    num_tokens = sum(routing_map.shape[0] for routing_map in case.maps)

    def total(table: Tensor) -> float:
        return int(table.sum() - only_others * table.trace()) / num_tokens

    found: dict[str, Any] = {}
    num_bytes: dict[str, list[float]] = {}
    for dispatcher in ("alltoall", name):
        traffic = computed(dispatcher, case)
        found = {stage: {figure: total(table) for figure, table in traffic[stage].items()} for stage in STAGES}
        for figures in found.values():
            figures["bytes"] = figures["row_bytes"] + figures["metadata_bytes"]
        num_bytes[dispatcher] = [found["dispatch"]["bytes"], found["dispatch"]["bytes"] + found["combine"]["bytes"]]
    ratios = [own / theirs for own, theirs in zip(num_bytes[name], num_bytes["alltoall"], strict=True)]
    return {**found, "of_alltoall": dict(zip(TARGETS, ratios, strict=True))}


def summarize(name: str, case: Case, how: str) -> dict[str, Any]:
    """Return a dispatcher's figures per token with the sizes of the case."""
    return {
        "dispatcher": name,
        "experts": case.num_experts,
        "topk": case.topk,
        "hidden": case.hidden_size,
        "ep": len(case.maps),
        "counts": how,
        "handed_over": figures_per_token(name, case, only_others=False),
        "to_others": figures_per_token(name, case, only_others=True),
    }


def format_table(entries: Sequence[dict[str, Any]], where: str) -> list[str]:
    """Return an aligned Markdown table of the figures per token."""
    lines = [COLUMNS.split("|")]
    for entry in entries:
        figures = entry[where]
        there, back = figures["dispatch"], figures["combine"]
        cells = [str(entry[key]) for key in ("experts", "ep", "counts", "dispatcher")]
        cells += [f"{there['rows']:.2f}", f"{there['bytes']:,.0f}", f"{there['metadata_bytes']:,.0f}"]
        cells += [f"{back['rows']:.2f}", f"{back['bytes']:,.0f}"]
        cells += [f"{ratio:.3f}" for ratio in figures["of_alltoall"].values()]
        lines.append(cells + [f"{figures[stage]['bytes']:,.0f}" for stage in STAGES[2:]])
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return [f"| {' | '.join(map(str.rjust, cells, widths))} |" for cells in lines]


def judge(entries: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return a line for each target, and whether all hold."""
    lines, holds = [], True
    for entry in entries:
        size = (entry["experts"], entry["topk"], entry["ep"], entry["hidden"])
        if (size, entry["dispatcher"]) != (TARGET_CASE, "deduplicated fp8"):
            continue
        for stages, limit in TARGETS.items():
            ratios = [entry[where]["of_alltoall"][stages] for where in ("handed_over", "to_others")]
            verdict = "holds" if max(ratios) <= limit else "MISSED"
            holds = holds and verdict == "holds"
            lines.append(
                f"- {stages}, metadata included: {ratios[0]:.3f} of alltoall's bytes handed over, {ratios[1]:.3f} of"
                f" those to other ranks; target at most {limit:.2f}: {verdict}"
            )
    name = "Target: deduplicated fp8 beside alltoall in bf16 at E = 64, K = 8, EP = 8, H = 1024"
    return [f"{name}{':' if lines else ' was not run.'}", *lines], holds


def find_peer(options: argparse.Namespace) -> str | None:
    """Return the folder of megatron-core, "" if it can be imported as it is, None if there is none."""
    if options.tiny or options.no_peer:
        return None
    if options.peer:
        return str(options.peer.resolve())
    folder = Path(sys.prefix) / "parity" / "megatron_core"
    if folder.is_dir():
        return str(folder)
    return None if importlib.util.find_spec("megatron") is None else ""


def peer_version(peer: str | None) -> str:
    """Return the version of megatron-core."""
    if peer is None:
        return "left out"
    from tests.parity.megatron import load

    sys.path.append(peer)
    return load("package_info").__version__


def run_cases(options: argparse.Namespace, peer: str | None) -> list[dict[str, Any]]:
    """Measure and compute every case, and return an entry for each with each dispatcher, by number of experts."""
    sizes = [(8, 2)] if options.tiny else [(64, 8), (256, 8)]  # E, K
    rank_counts = [(2, "measured"), (4, "computed")] if options.tiny else RANK_COUNTS
    names = [*DISPATCHERS, *(PEERS if peer is not None else ())]
    entries = []
    for num_ranks, how in rank_counts:
        cases = [draw_case(num_ranks, options.tokens, *size, options.hidden, options.seed) for size in sizes]
        if how == "measured":
            results = run_ranks(measure_all, num_ranks, cases, peer, timeout_s=900.0, group_timeout_s=300.0)
            for case, *by_rank in zip(cases, *results, strict=True):
                check_case(case, by_rank)
        entries += [summarize(name, case, how) for case in cases for name in names]
    return sorted(entries, key=lambda entry: entry["experts"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, compute, check, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="T, tokens of each rank")
    parser.add_argument("--hidden", type=int, default=1024, help="H, more than E")
    parser.add_argument("--seed", type=int, default=0, help="seed of the routing")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="a folder with megatron; default: where make puts it")
    parser.add_argument("--no-peer", action="store_true", help="leave megatron-core out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the report here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure here")
    parser.add_argument("--tiny", action="store_true", help="two ranks, T = 12, H = 32, no peer: a smoke test")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.tokens, options.hidden = 12, 32
    peer = find_peer(options)
    entries = run_cases(options, peer)
    run = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, gloo",
        "torch": torch.__version__,
        "megatron-core": peer_version(peer),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "settings": f"T = {options.tokens} a rank, H = {options.hidden}, K = {entries[0]['topk']}, bf16 rows,"
        f" seed {options.seed}",
    }
    verdict, holds = judge(entries)
    report = ["# Communication per token", "", *(f"- {key}: {value}" for key, value in run.items()), "", *verdict, ""]
    report += ["Handed over, the own rank included:", "", *format_table(entries, "handed_over"), ""]
    report += ["To other ranks:", "", *format_table(entries, "to_others")]
    print("\n".join(report))
    if options.markdown:
        options.markdown.write_text("\n".join(report) + "\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps({"run": run, "entries": entries}, indent=1) + "\n", encoding="utf-8")
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
