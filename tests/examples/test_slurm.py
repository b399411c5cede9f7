"""The SLURM script, run by stand-ins for scontrol and srun that know one node: it trains, and goes on if run again."""

import os
import subprocess
import sys
from pathlib import Path

from tests.examples.test_pretrain_gpt import TINY

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.slurm"
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames node[7-8]" ]] && printf 'localhost\\nnode8\\n'
"""
SRUN = """#!/bin/bash
[[ "$1" == --kill-on-bad-exit=1 ]] || exit 9
shift
SLURM_NODEID=0 "$@"
"""


def submit(folder: Path, flags: list[str]) -> subprocess.CompletedProcess[str]:
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1"}
    slurm |= {"SLURM_JOB_NAME": "tiny", "SLURM_CPUS_ON_NODE": "2", "RANKS_PER_NODE": "2", "DEVICE": "cpu"}
    slurm |= {"TORCHRUN": str(Path(sys.executable).with_name("torchrun")), "CHECKPOINTS": str(folder / "checkpoints")}
    environment = {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_slurm_script_trains_and_goes_on(tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    flags = [*TINY, "--data-path", str(ROOT / "README.md"), "--expert-model-parallel-size", "2", "--train-iters"]
    first = submit(tmp_path, [*flags, "2"])
    assert first.returncode == 0, first.stderr
    assert "no checkpoint in" in first.stdout
    assert "2 ranks" in first.stdout
    second = submit(tmp_path, [*flags, "3"])
    assert second.returncode == 0, second.stderr
    assert f"resumed from {tmp_path / 'checkpoints' / 'iter_0000002'} at step 2" in second.stdout


def test_options_of_the_job_come_before_its_commands() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) > 5
    assert max(options) < min(commands)  # sbatch stops reading options at the first command
