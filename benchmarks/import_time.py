"""How long `import moe` takes beside `import torch`: new interpreters, in turns, in one run.

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
import resource, sys
sys.path.insert(0, sys.argv[2])
__import__(sys.argv[1])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def cpu_seconds(module: str) -> float:
    """Return the processor time of a new interpreter that imports a module; other load hardly changes it."""
    found = subprocess.run([sys.executable, "-c", CODE, module, str(ROOT)], check=True, capture_output=True, text=True)
    return float(found.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="interpreters of each kind")
    parser.add_argument("--limit", type=float, help="the largest ratio that is good")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds ({options.rounds}) must be at least 1.")
    for module in ("torch", "moe"):
        cpu_seconds(module)  # compiles and caches what is not yet
    seconds = {module: [] for module in ("torch", "moe")}
    for _ in range(options.rounds):
        for module, values in seconds.items():
            values.append(cpu_seconds(module))
    found = spread(ratios(seconds["moe"], seconds["torch"]))
    print("\n".join(["# import moe", "", *format_run(describe_run(f"{options.rounds} rounds")), ""]))
    for module, values in seconds.items():
        print(f"import {module}: {statistics.median(values):.3f} s of processor time")
    print(f"moe / torch: {found['median']:.3f} (quartiles {found['q1']:.3f}..{found['q3']:.3f})")
    if options.limit is not None and found["median"] > options.limit:
        sys.exit(f"above --limit ({options.limit})")


if __name__ == "__main__":
    main()
