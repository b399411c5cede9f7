"""Which share of a layer's forward and backward each of its stages takes.

The layer runs as it is; hooks note the time where one stage ends and the next begins. In forward these are the hooks of
the modules before and after each call. In backward they are hooks of the tensors between stages: a stage ends when the
gradient of what it took in is there, and autograd runs the stages in turn, last one first. So the parts of one pass add
up to it; "rest" is what lies before the router and after the last stage. Adding the router's and the dispatcher's
gradients of the input counts as the router's.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmarks.timing import Forward
from moe import MoELayer

STAGES = ("router", "padding", "dispatch", "experts", "combine")
Marks = dict[str, float]  # what began or ended -> seconds


def timed_pass(layer: MoELayer, forward: Forward, x: Tensor, y_grad: Tensor) -> dict[str, dict[str, float]]:
    """Run one forward and backward; return {"forward": seconds by stage, "backward": the same}, each with "whole"."""
    marks: Marks = {}
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    handles = _hook(layer, marks)
    try:
        marks["begin"] = time.perf_counter()
        y = forward(x)
        marks["turn"] = time.perf_counter()
        y.backward(y_grad)
        marks["end"] = time.perf_counter()
    finally:
        for handle in handles:
            handle.remove()
    return {"forward": _parts(marks, "begin", "turn"), "backward": _backward_parts(marks)}


def _hook(layer: MoELayer, marks: Marks) -> list[Any]:
    """Note when stages begin and end; return the handles that take the hooks off."""

    def mark(name: str) -> None:
        marks.setdefault(name, time.perf_counter())

    def marked(tensor: Tensor, name: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: mark(name))

    def routed(module: object, args: object, output: tuple[Tensor, Tensor]) -> None:
        mark("router ends")
        marked(output[0], "dispatch done")

    def before_experts(module: object, args: Sequence[Any]) -> None:
        for tensor in (args[0].tokens, args[0].probs):
            marked(tensor, "experts done")
        mark("experts begin")

    def after_experts(module: object, args: object, output: Tensor) -> None:
        mark("experts end")
        marked(output, "combine done")

    return [
        layer.router.register_forward_pre_hook(lambda *_: mark("router begins")),
        layer.router.register_forward_hook(routed),
        layer.routing_map_padding.register_forward_pre_hook(lambda *_: mark("padding begins")),
        layer.routing_map_padding.register_forward_hook(lambda *_: mark("padding ends")),
        layer.experts.register_forward_pre_hook(before_experts),
        layer.experts.register_forward_hook(after_experts),
        layer.register_forward_hook(lambda *_: mark("combine ends")),
    ]


def _parts(marks: Marks, begin: str, end: str) -> dict[str, float]:
    """Return the seconds of each stage in forward, of the rest and of the whole."""
    parts = {
        "router": marks["router ends"] - marks["router begins"],
        "padding": marks["padding ends"] - marks["padding begins"],
        "dispatch": marks["experts begin"] - marks["padding ends"],
        "experts": marks["experts end"] - marks["experts begin"],
        "combine": marks["combine ends"] - marks["experts end"],
    }
    whole = marks[end] - marks[begin]
    return {**parts, "rest": whole - sum(parts.values()), "whole": whole}


def _backward_parts(marks: Marks) -> dict[str, float]:
    """Return the same for backward, where a routing map has no gradient."""
    edges = [marks[name] for name in ("turn", "combine done", "experts done", "dispatch done", "end")]
    combine, experts, dispatch, router = (after - before for before, after in itertools.pairwise(edges))
    parts = {"router": router, "padding": 0.0, "dispatch": dispatch, "experts": experts, "combine": combine}
    return {**parts, "rest": 0.0, "whole": marks["end"] - marks["turn"]}


def measure_breakdown(
    layer: MoELayer, forward: Forward, x: Tensor, y_grad: Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """Return {"forward", "backward", "both"}: the median over the rounds of each part's share of the whole pass.

    A part's share is of forward and backward together in all three, so that "forward" and "backward" add up to "both".
    Also "ms": the median of the whole pass, with the hooks.
    """
    passes = [timed_pass(layer, forward, x, y_grad) for _ in range(rounds + 1)][1:]  # the first one warms up
    wholes = [found["forward"]["whole"] + found["backward"]["whole"] for found in passes]
    shares: dict[str, dict[str, float]] = {}
    for part in (*STAGES, "rest", "whole"):
        both = [[found[way][part] / whole for found, whole in zip(passes, wholes, strict=True)] for way in
                ("forward", "backward")]  # fmt: skip
        columns = {"forward": both[0], "backward": both[1], "both": [a + b for a, b in zip(*both, strict=True)]}
        shares[part] = {way: statistics.median(values) for way, values in columns.items()}
    return {**shares, "ms": {"both": 1e3 * statistics.median(wholes)}}


def format_breakdown(case: dict[str, Any]) -> list[dict[str, str]]:
    """Return a line for forward, backward and both together of one case, heading -> cell."""
    shares = case["breakdown"]
    return [
        {"shape": case["shape"], "dtype": case["dtype"], "share of the pass": way}
        | {part: f"{100 * shares[part][way]:.1f} %" for part in (*STAGES, "rest", "whole")}
        for way in ("forward", "backward", "both")
    ]
