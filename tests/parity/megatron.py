"""megatron-core from PyPI, imported on a machine without a GPU.

The package expects CUDA, torch.compile and Triton when it is imported, but its routing functions are plain torch. What
it asks of them is answered here, for the import alone or, for the current device, with the CPU.
"""

import importlib
import importlib.machinery
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import torch

FOLDER = Path(sys.prefix) / "parity" / "megatron_core"
HOW = "megatron-core is not here: run these tests with `make test-parity`, which fetches it."


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


def load(module: str = "moe_utils") -> types.ModuleType:
    """Return megatron.core.transformer.moe.<module>.

    Raises:
        ModuleNotFoundError: the package is not in the environment's folder "parity"; the message names the make target.
    """
    if not (FOLDER / "megatron").is_dir():
        raise ModuleNotFoundError(HOW)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    stubs = {name: _Stub(name) for name in ("triton", "triton.language", "triton.runtime", "triton.compiler")}
    stubs = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    stubs.get("triton", types.SimpleNamespace()).language = stubs.get("triton.language")
    with mock.patch.dict(sys.modules, stubs), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            mock.patch.object(torch, "compile", _decorator),
            mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        ):
            loaded = importlib.import_module(f"megatron.core.transformer.moe.{module}")
            kept = {name: value for name, value in sys.modules.items() if name not in stubs}
    sys.modules.update(kept)  # patch.dict restores the table as it was; the package's modules stay
    return loaded
