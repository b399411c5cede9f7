"""benchmarks/layer.py runs at its tiny size, and its counter, floors and adapter are right."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"fp32": ["dense", "loop"], "bf16": ["dense", "loop", "fp32 loop"]}


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layer_benchmark", ROOT / "benchmarks" / "layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the command once, with the layer itself as its only peer."""
    folder = tmp_path_factory.mktemp("benchmark")
    command = [
        sys.executable,
        "benchmarks/layer.py",
        "--tiny",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--peer",
        "twin=layer",
    ]
    command += ["--json", str(folder / "run.json"), "--markdown", str(folder / "run.md")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((folder / "run.json").read_text())
    return {"report": report, "markdown": (folder / "run.md").read_text(), "out": result.stdout, "err": result.stderr}


def test_tiny_run_writes_every_figure(tiny_run):
    report = tiny_run["report"]
    assert set(report) == {"run", "cases"}
    assert report["run"].keys() >= {"cpu", "threads", "torch", "date", "command", "environment", "settings"}
    assert report["run"]["command"].startswith("python benchmarks/layer.py --tiny --rounds 2")
    assert [(case["shape"], case["dtype"]) for case in report["cases"]] == [("tiny", "fp32"), ("tiny", "bf16")]
    for case in report["cases"]:
        assert (case["tokens"], case["hidden"], case["ffn"], case["experts"], case["topk"]) == (60, 32, 24, 6, 2)
        floors = FLOORS[case["dtype"]]
        assert [entry["name"] for entry in case["entries"]] == [*floors, "moe", "twin"]
        assert [entry["kind"] for entry in case["entries"]] == ["floor"] * len(floors) + ["layer", "peer"]
        for entry in case["entries"]:
            assert list(entry["share_of_floor"]) == floors
            figures = [entry["ms_min"], entry["tokens_per_second"], *entry["share_of_floor"].values()]
            assert all(math.isfinite(figure) and figure > 0 for figure in figures)
            assert entry["ms_min"] <= entry["ms_median"] <= entry["ms_max"]


@pytest.mark.parametrize(("index", "itemsize"), [(0, 4), (1, 2)], ids=["fp32", "bf16"])
def test_tiny_run_counts_saved_bytes(tiny_run, index, itemsize):
    case = tiny_run["report"]["cases"][index]
    layer, twin = case["entries"][-2:]
    num_rows = 60 * 2
    assert case["stated_bytes"] == (60 * 32 + num_rows * 2 * 24) * itemsize + num_rows * (8 + 4)
    assert layer["saved_bytes"] >= (60 * 32 + num_rows * 2 * 24) * itemsize
    assert layer["saved_bytes_per_token"] == layer["saved_bytes"] / 60
    assert layer["saved_rows"] == pytest.approx(layer["saved_bytes"] / (num_rows * 32 * itemsize))
    assert layer["saved_of_stated"] == pytest.approx(layer["saved_bytes"] / case["stated_bytes"])
    assert twin["saved_bytes"] == layer["saved_bytes"]
    assert twin["max_abs_dy"] == 0.0


def test_tiny_run_prints_an_aligned_table_and_its_progress(tiny_run):
    assert tiny_run["out"].strip() == tiny_run["markdown"].strip()
    table = [line for line in tiny_run["out"].splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4 + 5
    assert {line.count("|") for line in table} == {14}
    assert len(set(map(len, table))) == 1
    rounds = [line.split(",")[0] for line in tiny_run["err"].splitlines() if " round " in line]
    assert rounds == [f"tiny {dtype} round {i}/2" for dtype in ("fp32", "bf16") for i in (1, 2)]


class ScaledSquare(torch.autograd.Function):
    """weight * x^2; keeps x, two views of one buffer, and the weight."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        buffer = torch.stack((2 * x, x * x))  # [2, n]
        ctx.save_for_backward(x, buffer[0], buffer[1], weight)
        return weight * buffer[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, double, square, weight = ctx.saved_tensors
        return grad * weight * double, (grad * square).sum()


def test_saved_bytes_counts_each_storage_once_and_leaves_out_parameters():
    x, weight = torch.arange(10.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    output, num_bytes = benchmark.count_saved_bytes(lambda: ScaledSquare.apply(x, weight), [weight])
    assert num_bytes == (10 + 2 * 10) * 4
    assert benchmark.count_saved_bytes(lambda: ScaledSquare.apply(x, weight), [])[1] == (10 + 2 * 10 + 1) * 4
    output.sum().backward()
    torch.testing.assert_close(x.grad, 6 * torch.arange(10.0))
    assert weight.grad.item() == 285.0


def test_saved_bytes_counts_a_view_as_its_whole_storage():
    base = torch.zeros(100, dtype=torch.float64)
    x = base[:10].requires_grad_()
    _, num_bytes = benchmark.count_saved_bytes(lambda: x * x, [])
    assert num_bytes == 100 * 8


def test_saved_bytes_leaves_out_graphs_that_died():
    x = torch.ones(10, requires_grad=True)

    def forward() -> Tensor:
        torch.ones(1000, requires_grad=True).exp().sum()
        return x.exp()  # keeps its own output

    output, num_bytes = benchmark.count_saved_bytes(forward, [])
    assert num_bytes == 10 * 4
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((10,), math.e))


def test_floors_multiply_every_row_of_every_expert():
    shape = benchmark.Shape(tokens=7, hidden=5, ffn=3, experts=4, topk=2)
    generator = torch.Generator().manual_seed(0)
    weights = benchmark.make_weights(shape, torch.float64, generator)
    counts = [6, 0, 1, 7]
    gemms = benchmark.floor_gemms(weights, counts, generator)
    assert (len(gemms["dense"]), len(gemms["loop"])) == (6, 3 * 6)
    num_flops = {name: sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b, _ in gemms[name]) for name in gemms}
    assert num_flops == dict.fromkeys(("dense", "loop"), 18 * 14 * 5 * 3)
    weight_rows = [right for _, right, _ in gemms["loop"][::6]]
    for expert, right in zip((0, 2, 3), weight_rows, strict=True):
        torch.testing.assert_close(right, weights["fc1"][expert].t(), rtol=0, atol=0)
    starts = [left.storage_offset() // 5 for left, _, _ in gemms["loop"][::6]]
    assert starts == [0, 6, 7]
    assert [left.shape[0] for left, _, _ in gemms["loop"][::6]] == [6, 1, 7]


@pytest.mark.parametrize(("compute_dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 2.0**-8)])
def test_floors_write_the_products_into_their_outputs(compute_dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, generator=generator).bfloat16() for size in ((6, 5), (5, 4)))
    out = torch.full((6, 4), math.nan, dtype=torch.bfloat16)
    benchmark.run_gemms([(left, right, out)], compute_dtype)
    torch.testing.assert_close(out.double(), left.double() @ right.double(), rtol=tolerance, atol=tolerance)


def test_summary_takes_the_median_of_the_ratios_of_each_round():
    times = {"dense": [1.0, 2.0, 6.0], "moe": [4.0, 4.0, 8.0]}
    entry = benchmark.summarize("moe", times, ["dense"], tokens=100)
    assert entry["share_of_floor"] == {"dense": 0.5}  # of 0.25, 0.5, 0.75
    assert (entry["ms_min"], entry["ms_median"], entry["ms_max"]) == (4000.0, 4000.0, 8000.0)
    assert entry["tokens_per_second"] == 25.0


def test_measure_times_a_slow_floor_once(capsys):
    calls = []

    def timer(name: str, seconds: float) -> Any:
        return lambda: calls.append(name) or seconds

    floors = {"dense": timer("dense", 11.0), "loop": timer("loop", 1.0)}
    times = benchmark.measure("case", floors, {"moe": timer("moe", 2.0)}, 2)
    assert times == {"dense": [11.0, 11.0], "loop": [1.0, 1.0], "moe": [2.0, 2.0]}
    assert calls == ["dense", "loop"] * 2 + ["loop", "moe", "moe", "loop"]
    assert "case round 2/2" in capsys.readouterr().err


def test_adapter_computes_the_weights_that_it_was_given():
    shape = benchmark.Shape(tokens=11, hidden=6, ffn=4, experts=5, topk=3)
    generator = torch.Generator().manual_seed(2)
    weights = benchmark.make_weights(shape, torch.float64, generator)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    module, forward = benchmark.build("softmax_post", 6, 4, 5, 3, torch.float64, 0)
    benchmark.set_weights(module, weights)
    top, chosen = (x @ weights["router.weight"].t()).topk(3, dim=-1)  # [T, K]
    probs = top.softmax(dim=-1)
    expected = torch.zeros_like(x)
    for token in range(11):
        for prob, expert in zip(probs[token], chosen[token], strict=True):
            gate, up = (weights["fc1"][expert] @ x[token]).chunk(2)
            expected[token] += prob * (weights["fc2"][expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(forward(x).detach(), expected, rtol=1e-6, atol=1e-6)  # the router scores in fp32
    torch.testing.assert_close(forward(x.view(1, 11, 6)).detach()[0], forward(x).detach(), rtol=0, atol=0)


def test_adapter_and_command_line_refuse_what_they_do_not_know(capsys):
    with pytest.raises(ValueError, match=r"kind \('sigmoid'\) must be 'softmax_post'"):
        benchmark.build("sigmoid", 6, 4, 5, 3, torch.float32, 0)
    module, _ = benchmark.build("softmax_post", 6, 4, 5, 3, torch.float32, 0)
    with pytest.raises(ValueError, match=r"weights \(\['fc1'\]\) must be exactly"):
        benchmark.set_weights(module, {"fc1": torch.zeros(5, 8, 6)})
    for arguments in (["--peer", "loop=x"], ["--peer", "x"], ["--rounds", "0"], ["--peer", "a=b", "--peer", "a=c"]):
        with pytest.raises(SystemExit):
            benchmark.parse_arguments(arguments)
        assert "must" in capsys.readouterr().err
    assert benchmark.parse_arguments(["--peer", "a=b.c:mixtral"]).peers == {"a": ("b.c", "mixtral")}
