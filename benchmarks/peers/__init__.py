"""Other implementations of the same layer, for benchmarks/layer.py: softmax over the selected logits, SwiGLU, no bias.

Each module here offers `version()`, and `build` and `set_weights` as benchmarks/README.md describes them. They run the
packages as they come from PyPI, in one process on the CPU. No package is imported before it is asked for.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One way to run one package.

    Attributes:
        package: its name on PyPI.
        module: ours, which runs it.
        kind: which way; what the module's `build` takes.
        max_experts: left out at more experts than that; None: never.
        multiplies_in: the one dtype of its experts' products; None: that of the parameters, or a wider one.
    """

    package: str
    module: str
    kind: str
    max_experts: int | None = None
    multiplies_in: str | None = None


_MEGATRON = {"package": "megatron-core", "module": "benchmarks.peers.megatron_core"}
_TRANSFORMERS = {"package": "transformers", "module": "benchmarks.peers.transformers_granite"}
_TORCHTITAN = {"package": "torchtitan", "module": "benchmarks.peers.torchtitan_moe"}
ADAPTERS = {
    "megatron-core-alltoall": Adapter(**_MEGATRON, kind="alltoall"),
    "megatron-core-allgather": Adapter(**_MEGATRON, kind="allgather"),
    "megatron-core-fused-activation": Adapter(**_MEGATRON, kind="alltoall fused activation"),
    "transformers-grouped-mm": Adapter(**_TRANSFORMERS, kind="grouped_mm"),
    # Autograd makes one gradient of all experts' weights for each expert: quadratic in their number.
    "transformers-eager": Adapter(**_TRANSFORMERS, kind="eager", max_experts=32),
    "torchtitan-bf16-experts": Adapter(**_TORCHTITAN, kind="bf16 experts", multiplies_in="bf16"),
    "torchtitan-fp32-experts": Adapter(**_TORCHTITAN, kind="fp32 experts"),
}
PACKAGES = tuple(dict.fromkeys(adapter.package for adapter in ADAPTERS.values()))
INSTALL = {
    "megatron-core": "make peers",
    "transformers": "make peers, or pip install transformers==5.23.0",
    "torchtitan": "make peers, or pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 and pip install tyro;"
    " it needs Python 3.11",
}


def choose(names: Sequence[str]) -> dict[str, Adapter]:
    """Return the adapters that "all", packages' names and adapters' names stand for, in the order of the table.

    Raises:
        ValueError: a name that stands for nothing.
    """
    known = {"all", *PACKAGES, *ADAPTERS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"peers ({', '.join(unknown)}) must be of: all, {', '.join([*PACKAGES, *ADAPTERS])}.")
    wanted = set(names)
    return {
        name: adapter
        for name, adapter in ADAPTERS.items()
        if "all" in wanted or name in wanted or adapter.package in wanted
    }


def versions(adapters: dict[str, Adapter]) -> dict[str, str]:
    """Return package -> version of what the adapters need.

    Raises:
        ImportError: a package that is not installed; the message says how to install it.
    """
    found: dict[str, str] = {}
    for adapter in adapters.values():
        if adapter.package not in found:
            try:
                found[adapter.package] = importlib.import_module(adapter.module).version()
            except ImportError as error:
                raise ImportError(
                    f"{adapter.package} cannot be imported ({error}). Install it: {INSTALL[adapter.package]}."
                ) from error
    return found
