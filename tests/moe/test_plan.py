"""The planner: which layouts it tries, what it refuses and why, its order, and its command line."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import moe.plan
from moe import TransformerConfig
from moe.layout import Batch, Layout
from moe.memory import memory_of
from moe.plan import GIB, Machine, flags_of, judge, layouts, main, plan, recomputed_operations

CONFIG = TransformerConfig(
    hidden_size=1024,
    num_moe_experts=8,
    moe_ffn_hidden_size=2816,
    moe_router_topk=2,
    num_layers=8,
    num_attention_heads=8,
    vocab_size=32000,
    params_dtype=torch.bfloat16,
)
MACHINE = Machine(
    world_size=16, gpus_per_node=8, memory_gib=40, reserved_gib=2, inside_gbs=300, across_gbs=40, tflops=400
)
BATCH = Batch(seq_length=4096, micro_batch_size=1)
FLAGS = (
    "--world-size 8 --gpu-memory-gb 24 --bf16 --seq-length 2048 --num-layers 8 --hidden-size 1024 --num-experts 8"
    " --moe-ffn-hidden-size 2816 --moe-router-topk 2 --num-attention-heads 8 --vocab-size 32000"
)


def test_every_factoring_is_judged_once() -> None:
    found = plan(CONFIG, MACHINE, BATCH)
    judged = [candidate.layout for candidate in (*found.fitting, *found.too_large)]
    # TP 1 2 4 8, EP 1 2 4 8, ETP 1 2 4 8 16 with EP x ETP <= 16, FSDP2 or not; TP 16 and EP 16 are refused.
    expected = {
        Layout(world_size=16, tp=tp, ep=ep, etp=etp, fsdp=fsdp)
        for tp in (1, 2, 4, 8)
        for ep in (1, 2, 4, 8)
        for etp in (1, 2, 4, 8, 16)
        for fsdp in (False, True)
        if ep * etp <= 16
    }
    assert set(judged) == expected
    assert len(judged) == len(expected)
    assert list(found.refused) == [
        "num_moe_experts (8) is not divisible by EP (16)",
        "num_attention_heads (8) is not divisible by TP (16)",
    ]


def test_all_of_a_list_fit_and_come_in_the_order_of_the_estimate() -> None:
    found = plan(CONFIG, MACHINE, BATCH)
    seconds = [candidate.seconds for candidate in found.fitting]
    assert len(seconds) > 10
    assert seconds == sorted(seconds)
    assert all(candidate.memory.total <= 38 * GIB for candidate in found.fitting)
    assert all(candidate.memory.total > 38 * GIB for candidate in found.too_large)
    first = found.fitting[0]
    assert first.reason.startswith("fits, shortest estimate")
    assert all(
        "sends more" in c.reason or "recomputes more" in c.reason for c in found.fitting if c.seconds > seconds[0]
    )


def test_the_least_recomputation_that_fits_is_taken() -> None:
    layout, batch = Layout(world_size=16, ep=8), replace(BATCH, micro_batch_size=4)
    sizes = {"tp": 1, "ep": 8, "etp": 1, "fsdp": False}
    needs = {mode: memory_of(CONFIG, layout, batch, mode).total / GIB for mode in ("none", "mlp", "layer", "block")}
    assert needs["none"] > needs["mlp"] > needs["layer"] > needs["block"]
    for mode, memory_gib in needs.items():
        machine = replace(MACHINE, memory_gib=memory_gib + 2.01)
        (candidate,) = plan(CONFIG, machine, batch, sizes=sizes).fitting
        assert candidate.recompute == mode
        assert ("to fit" in candidate.reason) == (mode != "none")
    machine = replace(MACHINE, memory_gib=needs["block"] + 1.5)
    (candidate,) = plan(CONFIG, machine, batch, sizes=sizes).too_large
    assert candidate.recompute == "block"
    assert candidate.reason.startswith("out of memory by 0.5 GiB; largest: ")
    (candidate,) = plan(replace(CONFIG, moe_layer_recompute=True), MACHINE, BATCH, sizes=sizes).fitting
    assert candidate.recompute == "layer"
    (candidate,) = plan(replace(CONFIG, moe_recompute="mlp"), MACHINE, BATCH, sizes=sizes).fitting
    assert candidate.recompute == "mlp"


def test_a_layout_says_where_it_communicates_and_what_all_tokens_on_one_rank_would_do() -> None:
    sizes = {"tp": 2, "ep": 8, "etp": 2, "fsdp": False}
    machine = replace(MACHINE, memory_gib=14)
    (candidate,) = plan(CONFIG, machine, BATCH, sizes=sizes).fitting
    assert "EP x ETP over 2 nodes; TP inside the node" in candidate.reason
    assert ("would not fit with all tokens on one rank" in candidate.reason) == (candidate.worst > 12 * GIB)
    roomy = plan(CONFIG, replace(MACHINE, memory_gib=candidate.worst / GIB + 2.1), BATCH, sizes=sizes)
    assert "would not fit" not in roomy.fitting[0].reason
    tight = plan(CONFIG, replace(MACHINE, memory_gib=candidate.worst / GIB + 1.9), BATCH, sizes=sizes)
    assert "would not fit" in tight.fitting[0].reason


def test_the_estimate_is_bytes_over_speed() -> None:
    layout = Layout(world_size=16, ep=8)
    candidate = judge(CONFIG, MACHINE, layout, BATCH, "none")
    inside = sum(candidate.sent.values()) - candidate.across
    assert candidate.across > 0
    assert candidate.seconds == pytest.approx(candidate.across / 40e9 + inside / 300e9)
    again = judge(CONFIG, MACHINE, layout, BATCH, "layer")
    # Two products of F and one back, of 2 * 4096 slots, in 8 blocks; a multiplication and an addition each.
    operations = 2 * 8 * 2 * 4096 * 3 * 2816 * 1024
    assert recomputed_operations(CONFIG, layout, BATCH, "layer") == operations
    assert recomputed_operations(CONFIG, layout, BATCH, "mlp") == operations * 2 / 3
    more = 2 * 8 * 4096 * (4 * 1024 * 1024 + 4096 * 1024)
    assert recomputed_operations(CONFIG, layout, BATCH, "block") == operations + more
    assert again.recompute_seconds == pytest.approx(operations / 400e12)
    assert again.sent["dispatch"] == pytest.approx(1.5 * candidate.sent["dispatch"], rel=1e-3)


def test_layouts_do_the_same_work() -> None:
    two = {"tp": 2, "ep": 1, "etp": 1, "fsdp": False}
    given = plan(CONFIG, MACHINE, BATCH, 16, sizes=two).fitting[0]
    assert plan(CONFIG, MACHINE, BATCH, sizes=two).fitting[0] == given
    tripled = plan(CONFIG, MACHINE, BATCH, 48, sizes=two).fitting[0]
    assert tripled.sent["tensor parallel"] == 3 * given.sent["tensor parallel"]
    assert tripled.sent["gradients"] == given.sent["gradients"]
    odd = plan(CONFIG, MACHINE, BATCH, 20, sizes=two)
    assert odd.refused == ("global_batch_size (20) is not divisible by micro_batch_size (1) x DP (8) = 8",)


def test_sizes_beyond_the_ranks_are_refused_not_computed() -> None:
    for sizes in ({"tp": 32}, {"ep": 8, "etp": 4}, {"tp": 3}):
        found = plan(CONFIG, MACHINE, BATCH, sizes=sizes)
        assert not found.fitting
        assert any("world_size (16) is not divisible by" in text for text in found.refused)
    assert list(layouts(1, {})) == [Layout(world_size=1)]


def test_flags_of_a_layout() -> None:
    layout = Layout(world_size=16, tp=2, ep=4, fsdp=True)
    block = judge(CONFIG, MACHINE, layout, BATCH, "block")
    assert flags_of(block) == (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --sequence-parallel"
        " --use-torch-fsdp2; in code: recompute(block, hidden_states)"
    )
    assert flags_of(judge(CONFIG, MACHINE, Layout(world_size=16), BATCH, "layer")) == "--moe-layer-recompute"
    assert flags_of(judge(CONFIG, MACHINE, Layout(world_size=16), BATCH, "mlp")) == "--moe-recompute mlp"
    assert flags_of(judge(CONFIG, MACHINE, Layout(world_size=16), BATCH, "none")) == "none"


def run(arguments: str, capsys: Any) -> tuple[str, int]:
    """Return what the command prints, and its exit status."""
    try:
        main(shlex.split(arguments))
    except SystemExit as error:
        return capsys.readouterr().out, int(str(error.code))
    return capsys.readouterr().out, 0


def test_json_says_what_the_table_says(capsys: Any) -> None:
    text, _ = run(FLAGS, capsys)
    parsed, status = run(f"{FLAGS} --json", capsys)
    found = json.loads(parsed)
    assert status == 0
    first = found["fitting"][0]
    header, line = next(
        (lines[i], lines[i + 1]) for lines in [text.splitlines()] for i in range(len(lines)) if lines[i].endswith("why")
    )
    cells = dict(zip(header.split(), line.split(maxsplit=len(header.split()) - 1), strict=True))
    assert cells["why"] == first["reason"]
    assert [int(cells[name]) for name in ("EP", "ETP", "DP", "EDP")] == [
        first["layout"][name] for name in ("ep", "etp", "dp", "edp")
    ]
    assert float(cells["total"]) == pytest.approx(first["memory_bytes"]["total"] / GIB, abs=0.051)
    parts = ("weights", "gradients", "optimizer", "activations", "working", "communication")
    assert sum(first["memory_bytes"][part] for part in parts) == pytest.approx(first["memory_bytes"]["total"], abs=6)
    assert float(cells["dispatch"]) == pytest.approx(first["sent_bytes_per_step"]["dispatch"] / 1e9, abs=0.0051)
    assert found["machine"]["world_size"] == 8
    assert f"{len(found['fitting'])} layouts of 8 GPUs fit 20 GiB a GPU" in text


def test_only_the_best_rows_are_shown(capsys: Any) -> None:
    text, _ = run(f"{FLAGS} --max-rows 2", capsys)
    shown = len(re.findall(r"^ *\d.*fits, ", text, flags=re.MULTILINE))
    number = int(text.split()[0])
    assert shown == 2
    assert f"... and {number - 2} more (--max-rows)" in text


def test_nothing_fits(capsys: Any) -> None:
    text, status = run(f"{FLAGS} --gpu-memory-gb 4.5", capsys)
    assert status == 1
    assert "0 layouts of 8 GPUs fit 0.5 GiB" in text
    assert "out of memory by" in text
    assert "Flags of the first" not in text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--world-size 0", "--world-size (0) must be a finite number and at least 1"),
        ("--gpu-memory-gb nan", "--gpu-memory-gb (nan) must be a finite number above 0"),
        ("--reserved-gb 30", "--reserved-gb (30.0) must be below --gpu-memory-gb (24.0)"),
        ("--load-imbalance 0.5", "--load-imbalance (0.5) must be a finite number and at least 1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size (0) must be a finite number"),
        ("--num-query-groups 3", "num_attention_heads (8) must be divisible by num_query_groups (3)"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_errors_say_what_to_mend(extra: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as error:
        main(shlex.split(f"{FLAGS} {extra}"))
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "--help lists the flags" in printed


def test_missing_model_flags_are_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(shlex.split("--world-size 8 --gpu-memory-gb 80 --seq-length 128"))
    assert "required: --moe-ffn-hidden-size, --num-experts, --hidden-size" in capsys.readouterr().err


def test_it_runs_without_processes_or_a_gpu() -> None:
    """The command of the help, with torch.distributed's start and every CUDA query refused."""
    command = next(re.finditer(r"python -m moe\.plan (.*?)\n\n", str(moe.plan.__doc__), flags=re.DOTALL)).group(1)
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "def refuse(*args, **kwargs): raise RuntimeError('called')\n"
        "dist.init_process_group = torch.cuda._lazy_init = torch.cuda.is_available = refuse\n"
        "from moe.plan import main\n"
        "main(sys.argv[1:])\n"
    )
    root = Path(__file__).parents[2]
    arguments = shlex.split(command.replace("\\\n", " "))
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "layouts of 64 GPUs fit 76 GiB a GPU, best first" in result.stdout
