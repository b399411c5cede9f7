"""docs/memory.md: its formulas give its numbers, and both are those of the code."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe import TransformerConfig
from moe.layout import Batch, Layout, expert_load
from moe.memory import bucket_bytes, gradient_bytes, memory_of, optimizer_bytes, parameter_bytes, weights_of
from moe.saved_bytes import saved_bytes
from moe.traffic import traffic_of

DOCS = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
CONFIG = TransformerConfig(
    hidden_size=4096,
    num_moe_experts=8,
    moe_ffn_hidden_size=14336,
    moe_router_topk=2,
    num_layers=32,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=32000,
    params_dtype=torch.bfloat16,
)
LAYOUT = Layout(world_size=64, tp=2, ep=8)
BATCH = Batch(seq_length=4096, micro_batch_size=1, num_microbatches=2)
SYMBOLS = {
    name: int(value) for name, value in re.findall(r"\b(\w+) = (\d+)\b", DOCS.split("    S = ")[1].split("##")[0])
}
SYMBOLS["S"] = 4096


def rows_of(section: str) -> dict[str, tuple[str, int]]:
    """Return formula and example by what they are, of the tables of a section."""
    text = DOCS.split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| `(.+?)` \| ([\d,]+) \|$", text, flags=re.MULTILINE)
    return {what: (formula, int(example.replace(",", ""))) for what, formula, example in found}


PARAMETERS = rows_of("Parameters, gradients, optimizer")
NUM_VALUES = sum(example for what, (_, example) in PARAMETERS.items() if "values" not in PARAMETERS[what][0])
SECTIONS = ["Parameters, gradients, optimizer", "Saved for backward", "While it runs", "Traffic"]
FORMULAS = [(what, *row) for section in SECTIONS for what, row in rows_of(section).items()]


def test_the_symbols_are_those_of_the_model() -> None:
    load = expert_load(CONFIG, LAYOUT, BATCH)
    assert load.rows == SYMBOLS["R"]
    assert load.slots == SYMBOLS["M"]
    assert BATCH.tokens(LAYOUT) == SYMBOLS["T"]
    assert (LAYOUT.dp, LAYOUT.edp, LAYOUT.tp_ep) == (SYMBOLS["DP"], SYMBOLS["EDP"], SYMBOLS["n"])
    assert len(FORMULAS) == 8 + 18 + 4 + 6


@pytest.mark.parametrize(("what", "formula", "example"), FORMULAS, ids=[row[0] for row in FORMULAS])
def test_a_formula_gives_its_example(what: str, formula: str, example: int) -> None:
    names = {**SYMBOLS, "values": NUM_VALUES, "min": min}
    assert eval(formula, {"__builtins__": {}}, names) == example


def test_parameters_gradients_and_optimizer_are_the_code_s() -> None:
    weights = weights_of(CONFIG, LAYOUT)
    assert sum(weight.numel for weight in weights) == NUM_VALUES
    assert parameter_bytes(weights, LAYOUT) == PARAMETERS["weights"][1]
    assert gradient_bytes(weights, LAYOUT) == PARAMETERS["gradients"][1]
    assert optimizer_bytes(weights, LAYOUT) == PARAMETERS["optimizer"][1]


def test_what_is_saved_is_the_code_s() -> None:
    rows = {what: example for what, (_, example) in rows_of("Saved for backward").items()}
    worst_slots, worst_bytes = rows.pop("slots"), rows.pop("rows and activation's input")
    assert saved_bytes(CONFIG, LAYOUT, BATCH) == sum(rows.values())
    worst = replace(BATCH, imbalance=math.inf)
    load = expert_load(CONFIG, LAYOUT, worst)
    assert load.slots == worst_slots
    grown = saved_bytes(CONFIG, LAYOUT, worst) - saved_bytes(CONFIG, LAYOUT, BATCH)
    even = (rows["experts: rows"] + rows["experts: activation's input"]) // 32
    indices_and_probs = 32 * (8 + 4) * (worst_slots - SYMBOLS["M"])
    assert grown == 32 * (worst_bytes - even) + indices_and_probs


def test_buffers_are_the_code_s() -> None:
    rows = {what: example for what, (_, example) in rows_of("While it runs").items()}
    logits, experts, travelling, bucket = rows.values()
    memory = memory_of(CONFIG, LAYOUT, BATCH)
    assert memory.working == max(logits, experts)
    assert memory.communication == max(travelling, bucket) == bucket_bytes(weights_of(CONFIG, LAYOUT), LAYOUT, 4)
    longer = replace(BATCH, seq_length=2**18)
    assert memory_of(CONFIG, LAYOUT, longer).communication == 64 * travelling


def test_traffic_is_the_code_s() -> None:
    rows = {what: example for what, (_, example) in rows_of("Traffic").items()}
    traffic = traffic_of(CONFIG, LAYOUT, BATCH)
    tokens = sum(part.bytes for part in traffic if part.kind in ("dispatch", "combine"))
    assert tokens == rows["dispatch, combine: rows"] + rows["dispatch: probs and counts"]
    gradients = {part.group: part.bytes for part in traffic if part.kind == "gradients"}
    assert gradients == {
        "world": rows["gradients: norms, router"],
        "dp": rows["gradients: attention, vocabulary"],
        "edp": rows["gradients: experts"],
    }
    assert [part.bytes for part in traffic if part.kind == "tensor parallel"] == [rows["tensor parallel"]]
