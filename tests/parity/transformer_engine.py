"""Transformer Engine's GroupedLinear from PyPI, imported and run on a machine without a GPU.

Its Python takes CPU tensors once it believes that they are on a GPU; of its bindings one is called, the grouped product
of matrices that are not quantized, and that is emulated here. Fits 2.20.2: some of what is replaced is private.
"""

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.parity import megatron

FOLDER = megatron.FOLDER.parent / "transformer_engine"
STUBS = ("triton", "triton.language", "triton.language.core", "triton.language.standard", "onnx", "onnxscript")
DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}


class _Anything:
    """Has every attribute and is 0; called as a decorator it returns the function."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __int__(self) -> int:
        return 0


class _Stub(types.ModuleType):
    """A module of which nothing is used beyond its names."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


def _bindings() -> types.ModuleType:
    """Return a transformer_engine_torch that multiplies."""
    tex = _Stub("transformer_engine_torch")
    tex.DType = IntEnum("DType", DTYPES)
    backends = {"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2}  # of attention; compared on import
    tex.NVTE_Fused_Attn_Backend = IntEnum("Backend", {f"NVTE_{name}": value for name, value in backends.items()})
    tex.te_general_grouped_gemm = _multiply
    return tex


@torch.no_grad()
def _multiply(a: list[Tensor], transa: bool, b: list[Tensor], transb: bool, out: list[Tensor], *rest: Any) -> Any:
    """Write each op(b) @ op(a), with row-major matrices; the bias is added, or is where the bias's gradient goes."""
    _, m_splits, biases, _, is_single, _, is_grad, _, _, accumulates, *_ = rest
    outputs = out[0].split(m_splits) if is_single else out
    for left, right, bias, output in zip(b, a, biases, outputs, strict=True):
        product = (left.t() if transb else left).float() @ (right.t() if transa else right).float()
        if bias.numel() and is_grad:
            bias.copy_(left.float().sum(0))
        elif bias.numel():
            product = product + bias.float()
        output.copy_(output + product if accumulates else product)
    return biases


def load() -> dict[str, types.ModuleType]:
    """Return the modules by which `moe.experts_te` reaches GroupedLinear, autocast and the recipes."""
    importlib.import_module("torch._dynamo")  # looks for Triton, and is not to find the stub
    package = types.ModuleType("transformer_engine.pytorch")  # its own file imports everything there is
    package.__path__ = [str(FOLDER / "transformer_engine" / "pytorch")]
    modules = {name: _Stub(name) for name in STUBS} | {
        "transformer_engine_torch": _bindings(),
        package.__name__: package,
    }
    with mock.patch.dict(sys.modules, modules), ExitStack() as patches:
        patches.enter_context(mock.patch.dict("os.environ", {"NVTE_PROJECT_BUILDING": "1"}))
        patches.enter_context(mock.patch.object(sys, "path", [str(FOLDER), *sys.path]))
        package.GroupedLinear = importlib.import_module("transformer_engine.pytorch.module").GroupedLinear
        quantization = importlib.import_module("transformer_engine.pytorch.quantization")
        for name in ("autocast", "is_fp8_available", "is_mxfp8_available", "is_nvfp4_available"):
            setattr(package, name, getattr(quantization, name))
        package.is_fp8_block_scaling_available = quantization.is_fp8_block_scaling_available
        importlib.import_module("transformer_engine.common.recipe")
        theirs = {n: m for n, m in sys.modules.items() if n in modules or n.split(".")[0] == "transformer_engine"}
        others = {n: m for n, m in sys.modules.items() if n not in theirs}
    sys.modules.update(others)  # patch.dict restores the table as it was
    return theirs


class _TorchOnCPU:
    """torch, but for what is allocated on a GPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def empty(self, *shape: int, device: object = None, **options: Any) -> Tensor:
        """Return uninitialised memory on the CPU."""
        return torch.empty(*shape, **options)


@contextmanager
def on_cpu(modules: dict[str, types.ModuleType], capability: tuple[int, int] = (10, 0)) -> Iterator[None]:
    """Let it take the CPU for a GPU of a compute capability: constructors, forward and backward."""
    names = ("cpp_extensions.gemm", "quantization", "utils")
    gemm, quantization, utils = (modules[f"transformer_engine.pytorch.{name}"] for name in names)
    supports = [name for name in vars(quantization) if name.startswith("_") and name.endswith("_SUPPORT")]
    with ExitStack() as patches:
        for place, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.version, "cuda", "13.0"),
            (Tensor, "is_cuda", True),
            (gemm, "torch", _TorchOnCPU()),
            (gemm, "get_sm_count", lambda: 1),
            (gemm, "get_cublas_workspace", lambda *args: [torch.empty(1)]),
            (gemm, "_empty_tensor", lambda: torch.empty(0)),
            (utils, "_empty_tensor", lambda: torch.empty(0)),
            (quantization, "get_device_compute_capability", lambda: capability),
            *((quantization, name, None) for name in supports),
        ):
            patches.enter_context(mock.patch.object(place, name, value))
        yield
