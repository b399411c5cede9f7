"""megatron-core from PyPI, imported and run on a machine without a GPU.

The package expects CUDA, torch.compile and Triton when it is imported, but its routing functions are plain torch. What
it asks of them is answered here, for the import alone or, for the current device, with the CPU.
"""

import importlib
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from router import RouterConfig, TopKRouter

FOLDER = Path(sys.prefix) / "parity" / "megatron_core"
HIDDEN_SIZE, NUM_EXPERTS = 16, 8  # of the routers, where a test does not say otherwise


class _Stub(types.ModuleType):
    """A module that has every name: decorators that return the function, and types that nobody instantiates."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        self.__version__ = "0"

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator


def _decorator(*args: object, **kwargs: object) -> object:
    """Return the function that is decorated, with or without arguments of the decorator."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _decorator


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let the package take the CPU for the current CUDA device."""
    with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):
        yield


def triton_stubs() -> dict[str, types.ModuleType]:
    """Return stand-ins, by name, for what is imported of Triton; none where it is imported already."""
    stubs = {name: _Stub(name) for name in ("triton", "triton.language", "triton.runtime", "triton.compiler")}
    stubs = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    stubs.get("triton", types.SimpleNamespace()).language = stubs.get("triton.language")
    return stubs


def load(module: str) -> types.ModuleType:
    """Return megatron.core.<module>."""
    return import_on_cpu(f"megatron.core.{module}", FOLDER)


def import_on_cpu(name: str, folder: Path) -> types.ModuleType:
    """Return a module, unpacked in a folder or installed, that is imported without GPU, Triton and compiler."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    stubs = triton_stubs()
    with mock.patch.dict(sys.modules, stubs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(torch, "compile", _decorator), on_cpu():
            loaded = importlib.import_module(name)
            kept = {name: value for name, value in sys.modules.items() if name not in stubs}
    sys.modules.update(kept)  # patch.dict restores the table as it was; the package's modules stay
    return loaded


def draw(*shape: int, seed: int) -> Tensor:
    """Return standard normal values, fp32, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router_pair(fields: dict[str, Any]) -> tuple[TopKRouter, Any]:
    """Return our router and Megatron-Core's with one configuration, and the same weights, biases and quantiles.

    moe_router_fusion is for ours alone: theirs needs a GPU for it.
    """
    fields = {"hidden_size": HIDDEN_SIZE, "num_moe_experts": NUM_EXPERTS, **fields}
    pair = TopKRouter(RouterConfig(**fields)), _their_router(fields)
    num_experts = fields["num_moe_experts"]
    with torch.no_grad():
        for router in pair:
            router.weight.copy_(draw(num_experts, fields["hidden_size"], seed=1) / 2)
            if router.bias is not None:
                router.bias.copy_(draw(num_experts, seed=2))
            for name in ("expert_bias", "qb_beta"):
                if getattr(router, name) is not None:
                    getattr(router, name).copy_(draw(num_experts, seed=3) / 4)
    return pair


def _their_router(fields: dict[str, Any]) -> Any:
    config_type = load("transformer.transformer_config").TransformerConfig
    groups = load("process_groups_config").ProcessGroupCollection()
    defaults = {"add_bias_linear": False, "moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": "fp32"}
    config = config_type(
        num_layers=1,
        num_attention_heads=1,
        moe_ffn_hidden_size=8,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **{**defaults, **{name: value for name, value in fields.items() if name != "moe_router_fusion"}},
    )
    for name in ("tp", "cp", "tp_cp", "tp_dp_cp"):
        setattr(groups, name, dist.group.WORLD)
    with on_cpu():
        router = load("transformer.moe.router").TopKRouter(config, pg_collection=groups)
    router.set_layer_number(1)
    return router.train()


def run_router(router: Any, hidden: Tensor, padding: Tensor | None = None) -> dict[str, Tensor]:
    """One forward and backward of a router of either kind; gradients add up to those that are there.

    Args:
        router: ours or Megatron-Core's.
        hidden: [S, B, H].
        padding: [S, B] bool, True = padding; or None. Results of padding tokens are left out.
    """
    hidden = hidden.clone().requires_grad_()
    with on_cpu():  # where their gate would move a weight from the CPU
        probs, routing_map = router(hidden) if padding is None else router(hidden, padding)
    weighted = probs * draw(*probs.shape, seed=4).to(probs.dtype)
    if padding is not None:
        valid = ~padding.flatten()
        probs, routing_map, weighted = probs[valid], routing_map[valid], weighted[valid]
    weighted.sum().backward()
    named = {"probs": probs, "routing_map": routing_map, "hidden": hidden.grad, "weight": router.weight.grad}
    return named if router.bias is None else {**named, "bias": router.bias.grad}
