"""benchmarks/layer.py runs at its tiny size, and what it counts, times, multiplies and prints is right."""

import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import floors, layer, peers, report, timing
from benchmarks.accuracy import experts_by_torch, measure_accuracy, relative_errors
from benchmarks.breakdown import STAGES, format_breakdown, measure_breakdown, timed_pass
from benchmarks.memory import count_saved_bytes, measure_peak_bytes

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"fp32": ["dense", "loop"], "bf16": ["dense", "loop", "fp32 loop"]}


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
        "--breakdown",
        "--report",
        "--results",
        str(folder / "results"),
    ]
    command += ["--json", str(folder / "run.json"), "--markdown", str(folder / "run.md")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((folder / "run.json").read_text())
    files = {path.name: path.read_text() for path in (folder / "results").iterdir()}
    markdown = (folder / "run.md").read_text()
    return {"report": found, "markdown": markdown, "files": files, "out": result.stdout, "err": result.stderr}


def test_tiny_run_writes_every_figure(tiny_run):
    found = tiny_run["report"]
    assert set(found) == {"run", "cases"}
    assert found["run"].keys() >= {"cpu", "threads", "torch", "date", "command", "environment", "settings"}
    assert found["run"]["command"].startswith("python benchmarks/layer.py --tiny --rounds 2")
    assert [(case["shape"], case["dtype"]) for case in found["cases"]] == [("tiny", "fp32"), ("tiny", "bf16")]
    for case in found["cases"]:
        assert (case["tokens"], case["hidden"], case["ffn"], case["experts"], case["topk"]) == (60, 32, 24, 6, 2)
        names = FLOORS[case["dtype"]]
        assert [entry["name"] for entry in case["entries"]] == [*names, "moe", "twin"]
        assert [entry["kind"] for entry in case["entries"]] == ["floor"] * len(names) + ["layer", "peer"]
        for entry in case["entries"]:
            assert list(entry["share_of_floor"]) == names
            figures = [entry["ms_min"], entry["tokens_per_second"], *entry["share_of_floor"].values()]
            assert all(math.isfinite(figure) and figure > 0 for figure in figures)
            assert entry["ms_min"] <= entry["ms_q1"] <= entry["ms_median"] <= entry["ms_q3"] <= entry["ms_max"]
        assert set(case["entries"][-2]["times_ours"].values()) == {1.0}


@pytest.mark.parametrize(("index", "itemsize"), [(0, 4), (1, 2)], ids=["fp32", "bf16"])
def test_tiny_run_counts_saved_bytes(tiny_run, index, itemsize):
    case = tiny_run["report"]["cases"][index]
    ours, twin = case["entries"][-2:]
    num_rows = 60 * 2
    assert case["stated_bytes"] == (60 * 32 + num_rows * 2 * 24) * itemsize + num_rows * (8 + 4)
    assert ours["saved_bytes"] >= (60 * 32 + num_rows * 2 * 24) * itemsize
    assert ours["saved_bytes_per_token"] == ours["saved_bytes"] / 60
    assert ours["saved_rows"] == pytest.approx(ours["saved_bytes"] / (num_rows * 32 * itemsize))
    assert ours["saved_of_stated"] == pytest.approx(ours["saved_bytes"] / case["stated_bytes"])
    assert twin["saved_bytes"] == ours["saved_bytes"]
    assert twin["max_abs_dy"] == 0.0


def test_tiny_run_prints_an_aligned_table_and_its_progress(tiny_run):
    assert tiny_run["out"].strip() == tiny_run["markdown"].strip()
    table = [line for line in tiny_run["out"].splitlines() if line.startswith("|")]
    for lines, num_lines, num_columns in ((table[:11], 2 + 4 + 5, 16), (table[11:], 2 + 2 * 3, 10)):
        assert len(lines) == num_lines
        assert {line.count("|") for line in lines} == {num_columns + 1}
        assert len(set(map(len, lines))) == 1
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
    output, num_bytes = count_saved_bytes(lambda: ScaledSquare.apply(x, weight), [weight])
    assert num_bytes == (10 + 2 * 10) * 4
    assert count_saved_bytes(lambda: ScaledSquare.apply(x, weight), [])[1] == (10 + 2 * 10 + 1) * 4
    output.sum().backward()
    torch.testing.assert_close(x.grad, 6 * torch.arange(10.0))
    assert weight.grad.item() == 285.0


def test_saved_bytes_counts_a_view_as_its_whole_storage():
    base = torch.zeros(100, dtype=torch.float64)
    x = base[:10].requires_grad_()
    _, num_bytes = count_saved_bytes(lambda: x * x, [])
    assert num_bytes == 100 * 8


def test_saved_bytes_leaves_out_graphs_that_died():
    x = torch.ones(10, requires_grad=True)

    def forward() -> Tensor:
        torch.ones(1000, requires_grad=True).exp().sum()
        return x.exp()  # keeps its own output

    output, num_bytes = count_saved_bytes(forward, [])
    assert num_bytes == 10 * 4
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((10,), math.e))


def test_floors_multiply_every_row_of_every_expert():
    shape = floors.Shape(tokens=7, hidden=5, ffn=3, experts=4, topk=2)
    generator = torch.Generator().manual_seed(0)
    weights = floors.make_weights(shape, torch.float64, generator)
    counts = [6, 0, 1, 7]
    gemms = floors.floor_gemms(weights, counts, generator)
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
    floors.run_gemms([(left, right, out)], compute_dtype)
    torch.testing.assert_close(out.double(), left.double() @ right.double(), rtol=tolerance, atol=tolerance)


def test_summary_takes_the_median_of_the_ratios_of_each_round():
    times = {"dense": [1.0, 2.0, 6.0], "moe": [4.0, 4.0, 8.0], "peer": [6.0, 4.0, 24.0]}
    entry = timing.summarize("moe", times, ["dense"], tokens=100)
    assert entry["share_of_floor"] == {"dense": 0.5}  # of 0.25, 0.5, 0.75
    assert (entry["ms_min"], entry["ms_median"], entry["ms_max"]) == (4000.0, 4000.0, 8000.0)
    assert (entry["ms_q1"], entry["ms_q3"]) == (4000.0, 6000.0)
    assert entry["tokens_per_second"] == 25.0
    ratios = timing.summarize("peer", times, ["dense"], tokens=100)["times_ours"]  # of 1.5, 1, 3
    assert ratios == {"median": 1.5, "min": 1.0, "max": 3.0, "q1": 1.25, "q3": 2.25}
    assert timing.spread([2.0]) == dict.fromkeys(("median", "min", "max", "q1", "q3"), 2.0)


def test_measure_times_what_is_slow_once_but_never_the_layer(capsys):
    calls = []

    def timer(name: str, seconds: float) -> Any:
        return lambda: calls.append(name) or seconds

    timers = {"dense": timer("dense", 101.0), "loop": timer("loop", 10.0), "moe": timer("moe", 200.0)}
    times = timing.measure("case", timers, 2)
    assert times == {"dense": [101.0, 101.0], "loop": [10.0, 10.0], "moe": [200.0, 200.0]}
    assert calls == ["dense", "loop", "moe", "dense", "loop", "moe", "moe", "loop"]
    assert "case round 2/2" in capsys.readouterr().err
    calls.clear()
    timing.measure("case", timers, 1, may_time_once=False)
    assert calls == ["dense", "loop", "moe"] * 2


def test_peak_is_what_was_resident_at_once():
    num_bytes = 64 << 20

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(num_bytes // 4)

    def together() -> int:
        return len([torch.ones(num_bytes // 4) for _ in range(3)])

    peaks = [measure_peak_bytes(function) for function in (one_after_the_other, together, lambda: None)]
    if peaks[0] is None:
        pytest.skip("the system does not say what is resident")
    assert peaks == pytest.approx([num_bytes, 3 * num_bytes, 0], abs=4 << 20)


def test_errors_of_bf16_experts_are_those_of_rounding():
    shape = floors.Shape(tokens=40, hidden=32, ffn=16, experts=4, topk=2)
    generator = torch.Generator().manual_seed(3)
    weights = floors.make_weights(shape, torch.bfloat16, generator)
    x = torch.randn(40, 32, generator=generator).bfloat16()
    module, forward = layer.build("softmax_post", *shape[1:], torch.bfloat16, 0)
    layer.set_weights(module, weights)
    errors = measure_accuracy(module, forward, x, weights)
    assert list(errors) == ["moe", "torch.mm"]
    for found in errors.values():
        assert 2.0**-11 < found["median"] < found["max"] < 2.0**-5
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]).double()
    found = relative_errors(expected + torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]), expected)
    assert found == {"max": 0.5, "median": pytest.approx(0.2)}


def test_experts_by_torch_by_hand():
    weights = {"fc1": torch.tensor([[[1.0], [2.0]], [[1.0], [-4.0]]]), "fc2": torch.tensor([[[3.0]], [[1.0]]])}
    probs = torch.tensor([[0.5, 0.0], [0.25, 0.75]])  # token 1 goes to both experts
    silu = 1 / (1 + math.exp(-1.0))
    output = experts_by_torch(torch.ones(2, 1), probs, weights)
    torch.testing.assert_close(output, silu * torch.tensor([[0.5 * 6.0], [0.25 * 6.0 - 0.75 * 4.0]]))


def test_breakdown_adds_up_and_leaves_the_layer_as_it_was():
    shape = floors.Shape(tokens=300, hidden=64, ffn=48, experts=6, topk=2)
    module, forward = layer.build("softmax_post", *shape[1:], torch.float32, 0)
    x, y_grad = torch.randn(300, 64), torch.randn(300, 64)
    seconds = timed_pass(module, forward, x, y_grad)
    for way in ("forward", "backward"):
        assert sum(seconds[way][part] for part in (*STAGES, "rest")) == pytest.approx(seconds[way]["whole"])
        assert min(seconds[way].values()) >= 0
        assert all(seconds[way][part] > 0 for part in ("router", "dispatch", "experts", "combine"))
    shares = measure_breakdown(module, forward, x, y_grad, 5)
    assert sum(shares[part]["both"] for part in (*STAGES, "rest")) == pytest.approx(1.0, abs=0.1)
    assert shares["experts"]["both"] == max(shares[stage]["both"] for stage in STAGES)
    assert shares["whole"]["forward"] + shares["whole"]["backward"] == pytest.approx(1.0, abs=0.1)
    stages = (module, module.router, module.routing_map_padding, module.experts)
    assert not any(stage._forward_hooks or stage._forward_pre_hooks for stage in stages)


def test_breakdown_gives_a_delay_to_the_stage_that_has_it(monkeypatch):
    module, forward = layer.build("softmax_post", 16, 8, 4, 2, torch.float32, 0)
    postprocess, delay = module.token_dispatcher.dispatch_postprocess, 0.2
    monkeypatch.setattr(
        module.token_dispatcher, "dispatch_postprocess", lambda *args: time.sleep(delay) or postprocess(*args)
    )
    seconds = timed_pass(module, forward, torch.randn(20, 16), torch.randn(20, 16))["forward"]
    assert delay < seconds["dispatch"] < seconds["whole"]
    assert max(seconds[stage] for stage in STAGES if stage != "dispatch") < delay


def test_breakdown_is_printed_in_percent():
    parts = {part: {"forward": 0.25, "backward": 0.5, "both": 0.75} for part in (*STAGES, "rest", "whole")}
    lines = format_breakdown({"shape": "S0", "dtype": "fp32", "breakdown": parts})
    assert [line["share of the pass"] for line in lines] == ["forward", "backward", "both"]
    assert [line["experts"] for line in lines] == ["25.0 %", "50.0 %", "75.0 %"]


@pytest.mark.parametrize(
    ("cpu", "instructions", "flags", "slug"),
    [
        ("Intel(R) Xeon(R) Processor", "AVX512", "fpu amx_bf16 amx_tile", "xeon-avx512-amx"),
        ("Intel(R) Xeon(R) Platinum 8488C", "AVX512", "amx_tile", "xeon-platinum-8488c-avx512-amx"),
        ("AMD EPYC", "AVX2", "fpu avx2", "epyc-avx2"),
        ("AMD EPYC 7763 64-Core Processor", "AVX2", "", "epyc-7763-avx2"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "AVX2", "", "core-i7-8700-avx2"),
        ("Apple M2", "DEFAULT", "", "m2-default"),
    ],
)
def test_hardware_has_a_short_name(cpu, instructions, flags, slug):
    assert report.hardware_slug(cpu, instructions, flags) == slug


def test_report_is_named_theme_hardware_date(tiny_run):
    date = tiny_run["report"]["run"]["date"][:10]
    files = {Path(name).suffix: name for name in tiny_run["files"]}
    assert set(files) == {".md", ".json"}
    for ending, name in files.items():
        assert name == report.report_path("layer", Path(), date).name + ending
    assert tiny_run["files"][files[".md"]] == tiny_run["markdown"]
    assert json.loads(tiny_run["files"][files[".json"]]) == tiny_run["report"]


def test_table_is_aligned_by_column():
    assert report.format_table([{"a": "1", "long": "x"}, {"a": "12345", "long": "y"}]) == [
        "| a     | long |",
        "| ----- | ---- |",
        "| 1     | x    |",
        "| 12345 | y    |",
    ]


def test_lines_below_the_machine_name_the_best_peer_and_who_is_left_out(tiny_run):
    case = json.loads(json.dumps(tiny_run["report"]["cases"][1]))
    peer = next(entry for entry in case["entries"] if entry["kind"] == "peer")
    peer["times_ours"] = {"median": 1.25, "min": 1.0, "max": 2.0, "q1": 1.1, "q3": 1.5}
    case["left_out"] = ["transformers-eager (over 32 experts)"]
    case["relative_errors"] = {"moe": {"max": 0.5, "median": 0.25}}
    lines = layer.describe_case(case)
    assert "the best peer is twin with 1.25 (1.10..1.50) x ours in the same round, 1.00 at least" in lines[1]
    assert lines[2] == "- tiny bf16: left out transformers-eager (over 32 experts)"
    assert lines[3].endswith("max and median: moe 5.00e-01, 2.50e-01")
    other = {**peer, "name": "faster", "times_ours": {**peer["times_ours"], "median": 0.5}}
    assert "the best peer is faster" in layer.describe_case({**case, "entries": [peer, other]})[1]
    in_fp32 = {**case, "dtype": "fp32", "entries": [peer, {**other, "multiplies_in": "bf16"}]}
    assert "the best peer is twin" in layer.describe_case(in_fp32)[1]
    assert layer.describe_case(in_fp32)[2].endswith("faster multiplies in bf16 and does not count among the peers")


def test_peers_are_chosen_by_adapter_package_or_all():
    assert list(peers.choose(["transformers"])) == ["transformers-grouped-mm", "transformers-eager"]
    assert list(peers.choose(["torchtitan-fp32-experts", "megatron-core-allgather"])) == [
        "megatron-core-allgather",
        "torchtitan-fp32-experts",
    ]
    assert list(peers.choose(["all"])) == list(peers.ADAPTERS)
    assert peers.choose([]) == {}
    with pytest.raises(ValueError, match=r"peers \(tutel\) must be of: all, megatron-core"):
        peers.choose(["tutel", "all"])


def test_a_peer_that_is_not_installed_ends_the_run_with_the_command_that_installs_it(capsys, monkeypatch):
    for name in ("transformers", "transformers.models.granitemoe.modeling_granitemoe"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    with pytest.raises(SystemExit) as raised:
        layer.parse_arguments(["--tiny", "--peers", "transformers"])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "transformers cannot be imported" in message
    assert "Install it: make peers, or pip install transformers==5.23.0." in message


def test_an_adapter_is_left_out_above_its_experts():
    shape = floors.Shape(tokens=3, hidden=4, ffn=2, experts=3, topk=2)
    weights = floors.make_weights(shape, torch.float32, torch.Generator().manual_seed(0))
    adapters = {
        name: peers.Adapter(package="moe", module="benchmarks.layer", kind="softmax_post", max_experts=limit)
        for name, limit in (("two", 2), ("three", 3), ("any", None))
    }
    candidates, left_out = layer.build_candidates(shape, weights, Namespace(peer={}, adapters=adapters, seed=0))
    assert list(candidates) == ["moe", "three", "any"]
    assert left_out == ["two (over 2 experts)"]


def test_adapter_computes_the_weights_that_it_was_given():
    shape = floors.Shape(tokens=11, hidden=6, ffn=4, experts=5, topk=3)
    generator = torch.Generator().manual_seed(2)
    weights = floors.make_weights(shape, torch.float64, generator)
    x = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    module, forward = layer.build("softmax_post", 6, 4, 5, 3, torch.float64, 0)
    layer.set_weights(module, weights)
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
    with pytest.raises(ValueError, match=r"kind \('sigmoid'\) must be one of \['softmax_post'"):
        layer.build("sigmoid", 6, 4, 5, 3, torch.float32, 0)
    module, _ = layer.build("softmax_post", 6, 4, 5, 3, torch.float32, 0)
    with pytest.raises(ValueError, match=r"weights \(\['fc1'\]\) must be exactly"):
        layer.set_weights(module, {"fc1": torch.zeros(5, 8, 6)})
    for arguments in (
        ["--peer", "loop=x"],
        ["--peer", "x"],
        ["--rounds", "0"],
        ["--peer", "a=b", "--peer", "a=c"],
        ["--peers", "x"],
    ):
        with pytest.raises(SystemExit):
            layer.parse_arguments(arguments)
        assert "must" in capsys.readouterr().err
    assert layer.parse_arguments(["--peer", "a=b.c:mixtral"]).peer == {"a": ("b.c", "mixtral")}
