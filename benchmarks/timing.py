"""How long things take: interleaved rounds in one process, medians, spreads and ratios of each round."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]  # [T, H] -> [T, H]
Timers = dict[str, Callable[[], float]]  # each returns seconds
Times = dict[str, list[float]]  # seconds by name, one a round
OURS = "moe"  # the name of this library's layer among the entries


def time_call(function: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def time_step(module: nn.Module, forward: Forward, x: Tensor, y_grad: Tensor) -> float:
    """Return the seconds of one forward and backward; x needs a gradient, parameter gradients start as None."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    return time_call(lambda: forward(x).backward(y_grad))


def measure(label: str, timers: Timers, rounds: int, *, may_time_once: bool = True) -> Times:
    """Time every entry once a round, the order rotated by one place a round; return the seconds by name.

    Each runs once before. One that then takes over a second and ten times the fastest (bf16 without bf16 instructions,
    a quadratic peer) is timed once more, and that time stands for every round; not `OURS`, and none where
    `may_time_once` is False.
    """
    first = {name: timer() for name, timer in timers.items()}
    limit = max(1.0, 10 * min(first.values()))
    slow = {name for name, seconds in first.items() if may_time_once and seconds > limit and name != OURS}
    times = {name: [timer()] * rounds if name in slow else [] for name, timer in timers.items()}
    calls = [(name, timer) for name, timer in timers.items() if name not in slow]
    for index in range(rounds):
        gc.collect()
        start = index % len(calls)
        for name, call in calls[start:] + calls[:start]:
            times[name].append(call())
        latest = ", ".join(f"{name} {1e3 * times[name][-1]:.2f}" for name, _ in calls)
        print(f"{label} round {index + 1}/{rounds}, ms: {latest}", file=sys.stderr, flush=True)
    return times


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min, max, and the lower and upper quartile (interpolated between the values)."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": quartiles[1], "min": min(values), "max": max(values), "q1": quartiles[0], "q3": quartiles[2]}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def summarize(name: str, times: Times, floors: Iterable[str], tokens: int) -> dict[str, Any]:
    """Return an entry's spread in ms, tokens a second, and over the rounds floor / time and time / our time."""
    seconds = times[name]
    entry = {f"ms_{figure}": 1e3 * value for figure, value in spread(seconds).items()}
    entry["tokens_per_second"] = tokens / statistics.median(seconds)
    shares = {floor: statistics.median(ratios(times[floor], seconds)) for floor in floors}
    return {**entry, "share_of_floor": shares, "times_ours": spread(ratios(seconds, times[OURS]))}
