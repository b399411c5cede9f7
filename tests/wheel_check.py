"""Check an installed wheel; run by `make wheel` as `python -I tests/wheel_check.py REPOSITORY`.

The environment holds the wheel, torch and einops with what they need, and nothing else: the packages must import, a
layer must run forward and backward, and every source file of the repository must have come along.
"""

import importlib
import importlib.util
import sys
import warnings
from importlib.metadata import files, requires, version
from pathlib import Path

PACKAGES = ("moe", "router", "dispatchers")
OPTIONAL = (
    "transformer_engine",
    "triton",
    "transformers",
    "safetensors",
    "matplotlib",
    "tensorboard",
    "numpy",
    "pytest",
)


def check_imports(repository: Path) -> None:
    """Import the three packages from the wheel, not from the repository."""
    importlib.import_module("torch.distributed")
    before = set(sys.modules)
    for name in PACKAGES:
        module = importlib.import_module(name)
        location = Path(str(module.__file__)).resolve()
        if repository in location.parents and "site-packages" not in location.parts:
            raise SystemExit(f"{name} was imported from the repository ({location}), not from the wheel.")
    present = [name for name in OPTIONAL if name in set(sys.modules) - before]
    if present:
        raise SystemExit(f"importing {', '.join(PACKAGES)} imported {present}, which they must do without.")


def check_contents(repository: Path) -> None:
    """Compare the files of the wheel with the sources."""
    packed = {file.as_posix() for file in files("moe-pipeline") or []}
    sources = [path for name in PACKAGES for path in (repository / name).rglob("*.py")]
    wanted = {path.relative_to(repository).as_posix() for path in sources}
    wanted |= {f"{name}/py.typed" for name in PACKAGES}
    if missing := sorted(wanted - packed):
        raise SystemExit(f"the wheel lacks {missing}; are all packages listed in pyproject.toml?")


def check_layer() -> None:
    """Run one layer forward and backward."""
    import torch

    from moe import MoEConfig, MoELayer

    config = MoEConfig(hidden_size=16, num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2)
    torch.manual_seed(0)
    layer = MoELayer(config)
    hidden_states = torch.randn(32, 2, 16, requires_grad=True)  # [S, B, H]
    layer(hidden_states).square().sum().backward()
    gradients = [hidden_states.grad, *(parameter.grad for parameter in layer.parameters())]
    if not all(gradient is not None and gradient.isfinite().all() and gradient.any() for gradient in gradients):
        raise SystemExit("a gradient of the layer is missing, not finite or zero.")


def main() -> None:
    """Run the checks on the repository named on the command line."""
    repository = Path(sys.argv[1]).resolve()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    unconditional = sorted(r for r in requires("moe-pipeline") or [] if "extra ==" not in r)
    if [requirement.split(">")[0] for requirement in unconditional] != ["einops", "torch"]:
        raise SystemExit(f"the wheel requires {unconditional}; it must require einops and torch alone.")
    check_imports(repository)
    check_contents(repository)
    check_layer()
    absent = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    print(f"moe-pipeline {version('moe-pipeline')} works without {', '.join(absent)}.")


if __name__ == "__main__":
    main()
