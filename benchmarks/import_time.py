"""How long `import moe` takes beside `import torch`: each new interpreter imports torch, and then moe.

`import moe` alone would import torch first too, so both figures have the same import of torch in them: what moves it
(it takes 1.2 to 1.7 s from one interpreter to the next) moves their ratio little.
`--limit` ends with code 1 if the median ratio of the rounds is above it.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import describe_run, format_run
from benchmarks.timing import ratios, spread

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
used = [time.process_time()]
for name in sys.argv[2:]:
    __import__(name)
    used.append(time.process_time())
print(*(after - before for before, after in zip(used, used[1:])))
"""


def cpu_seconds(*modules: str) -> list[float]:
    """Return the processor time of each import in a new interpreter, in order; other load hardly changes it."""
    command = [sys.executable, "-c", CODE, str(ROOT), *modules]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(seconds) for seconds in output.split()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="interpreters")
    parser.add_argument("--limit", type=float, help="the largest ratio that is good")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds ({options.rounds}) must be at least 1.")
    cpu_seconds("torch", "moe")  # compiles and caches what is not yet
    torch_only, with_moe = [], []
    for _ in range(options.rounds):
        torch_seconds, more_seconds = cpu_seconds("torch", "moe")
        torch_only.append(torch_seconds)
        with_moe.append(torch_seconds + more_seconds)
    found = spread(ratios(with_moe, torch_only))
    print("\n".join(["# import moe", "", *format_run(describe_run(f"{options.rounds} rounds")), ""]))
    print(f"import torch: {statistics.median(torch_only):.3f} s of processor time")
    print(f"import moe: {statistics.median(with_moe):.3f} s of processor time")
    print(f"moe / torch: {found['median']:.3f} (quartiles {found['q1']:.3f}..{found['q3']:.3f})")
    if options.limit is not None and found["median"] > options.limit:
        sys.exit(f"above --limit ({options.limit})")


if __name__ == "__main__":
    main()
