"""Rules of the three packages that hold for every file: what they import, call and document."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {  # package -> the own packages that it may import
    "router": {"router"},
    "dispatchers": {"dispatchers"},
    "moe": {"moe", "router", "dispatchers"},
}
DEPENDENCIES = {"torch", "einops"}
# library -> end of the files that import it
KERNEL_FILES = {"triton": "_triton.py", "transformer_engine": "_te.py", "deep_ep": "deepep_dispatcher.py"}
COLLECTIVE_FILES = {"dispatchers/collectives.py", "router/collectives.py", "moe/parallel.py", "moe/gradients.py"}
COLLECTIVE = re.compile(
    r"(all_to_all|all_gather|all_reduce|reduce_scatter|broadcast|gather|scatter|reduce|send|recv|isend|irecv)(_.*)?"
    r"|batch_isend_irecv|(monitored_)?barrier|allgather.*|allreduce.*"
)
MACHINE_PATH = re.compile(r"(^|[^A-Za-z0-9.])/(work|tmp|farm|root|home|Users|mnt)/[A-Za-z.]")
# What autograd calls; the docstring of the function class states their contract.
AUTOGRAD_HOOKS = {"backward", "setup_context"}

SOURCES = sorted(path.relative_to(ROOT).as_posix() for package in LAYERS for path in (ROOT / package).rglob("*.py"))
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "."]
    return []


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a module that run when it is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.Lambda) or _is_type_checking(child):
            continue
        yield child
        yield from _executed_at_import(child)


def import_faults(path: str, source: str) -> list[str]:
    """Return the imports of a file that break the order of the layers or need an optional package at import."""
    tree = ast.parse(source)
    package = path.split("/")[0]
    faults = []
    for node in ast.walk(tree):
        for name in _imported(node):
            top = name.split(".")[0]
            if not top or (top in LAYERS and top not in LAYERS[package]):
                faults.append(f"{path}:{node.lineno}: {package} must not import {name}")
            if top in KERNEL_FILES and not path.endswith(KERNEL_FILES[top]):
                faults.append(f"{path}:{node.lineno}: only files ending in {KERNEL_FILES[top]} import {top}")
    for node in _executed_at_import(tree):
        for name in _imported(node):
            top = name.split(".")[0]
            allowed = top in DEPENDENCIES | set(LAYERS) | set(KERNEL_FILES) or top in sys.stdlib_module_names
            if top and not allowed:
                faults.append(f"{path}:{node.lineno}: {name} is optional and must be imported where it is used")
    return faults


def _names_from_torch(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for, for example dist -> torch.distributed."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def collective_calls(path: str, source: str) -> list[str]:
    """Return the collectives of torch.distributed that a file calls or hands on."""
    tree = ast.parse(source)
    names = _names_from_torch(tree)
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        first, *rest = ast.unparse(node).split(".")
        full = ".".join([names.get(first, first), *rest])
        if full.startswith("torch.distributed.") and COLLECTIVE.fullmatch(full.rsplit(".", 1)[1]):
            calls.append(f"{path}:{node.lineno}: {full}")
    return calls


def state_faults(path: str, source: str) -> list[str]:
    """Return `global` statements and accesses to `.data`, behind which autograd does not see a write."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Global):
            faults.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
        if isinstance(node, ast.Attribute) and node.attr == "data":
            faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return faults


def missing_docstrings(path: str, source: str) -> list[str]:
    """Return the public module, functions, classes and methods of a file that have no docstring."""

    def below(owner: str, node: ast.Module | ast.ClassDef) -> Iterator[str]:
        if not ast.get_docstring(node):
            yield owner
        for child in node.body:
            if not isinstance(child, FunctionNode | ast.ClassDef) or child.name.startswith("_"):
                continue
            if isinstance(child, ast.ClassDef):
                yield from below(f"{owner}: {child.name}", child)
            elif not ast.get_docstring(child) and not (isinstance(node, ast.ClassDef) and child.name in AUTOGRAD_HOOKS):
                yield f"{owner}: {child.name}"

    return list(below(path, ast.parse(source)))


def _faults_of_sources(check: object, skip: set[str] = frozenset()) -> str:
    assert callable(check)
    faults = [fault for path in SOURCES if path not in skip for fault in check(path, (ROOT / path).read_text())]
    return "\n".join(faults)


def test_the_packages_are_found() -> None:
    assert {f"{package}/__init__.py" for package in LAYERS} <= set(SOURCES)


def test_imports_point_one_way_and_need_torch_and_einops_alone() -> None:
    assert _faults_of_sources(import_faults) == ""


def test_collectives_are_called_in_four_files_alone() -> None:
    assert _faults_of_sources(collective_calls, skip=COLLECTIVE_FILES) == ""
    for path in sorted(COLLECTIVE_FILES):
        assert collective_calls(path, (ROOT / path).read_text()), f"{path} calls no collective"


def test_there_is_no_global_statement_and_no_data_access() -> None:
    assert _faults_of_sources(state_faults) == ""


def test_everything_public_has_a_docstring() -> None:
    assert _faults_of_sources(missing_docstrings) == ""


def test_every_package_is_listed_for_the_wheel() -> None:
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {Path(path).parent.as_posix().replace("/", ".") for path in SOURCES}
    assert sorted(listed) == sorted(folders)


IMPORT_SCRIPT = """
import importlib.abc
import sys

BLOCKED = {"transformer_engine", "triton", "transformers", "safetensors", "matplotlib", "tensorboard"}

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import torch
import torch.distributed

def refuse(name):
    def call(*args, **kwargs):
        raise RuntimeError(f"torch.cuda.{name} was called at import")
    return call

for name in ("is_available", "device_count", "current_device", "current_stream", "get_device_capability",
             "get_device_properties", "init", "synchronize", "_lazy_init"):
    setattr(torch.cuda, name, refuse(name))
import dispatchers, moe, router
print("imported", sorted(BLOCKED & set(sys.modules)))
"""


def test_import_needs_no_optional_package_and_asks_no_device() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "imported []\n"


def test_no_file_names_a_path_of_one_machine() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    found = []
    for path in map(ROOT.joinpath, run.stdout.splitlines()):
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            lines = enumerate(content.decode(errors="replace").splitlines(), 1)
            found += [
                f"{path.relative_to(ROOT)}:{number}: {line}" for number, line in lines if MACHINE_PATH.search(line)
            ]
    assert "\n".join(found) == ""


@pytest.mark.parametrize(
    ("path", "source", "num_faults"),
    [
        ("router/a.py", "import moe.layer", 1),
        ("router/a.py", "def f():\n    from dispatchers.base import Plan", 1),
        ("dispatchers/a.py", "from . import base", 1),
        ("moe/a.py", "import router\nfrom dispatchers import permute\nfrom moe.layer import MoELayer", 0),
        ("moe/a.py", "import os, torch.distributed as dist, einops", 0),
        ("moe/a.py", "try:\n    import numpy\nexcept ImportError:\n    pass", 1),
        ("moe/a.py", "class A:\n    import safetensors.torch", 1),
        ("moe/a.py", "def f():\n    import safetensors", 0),
        ("moe/a.py", "if TYPE_CHECKING:\n    import numpy", 0),
        ("moe/a.py", "def f():\n    import triton", 1),
        ("moe/a_triton.py", "import triton.language as tl", 0),
        ("moe/a_te.py", "import triton", 1),
    ],
)
def test_import_faults_are_found(path: str, source: str, num_faults: int) -> None:
    assert len(import_faults(path, source)) == num_faults


@pytest.mark.parametrize(
    ("source", "num_calls"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", 1),
        ("import torch\ntorch.distributed.all_to_all_single(x, y)", 1),
        ("from torch import distributed\ndistributed.barrier()", 1),
        ("from torch.distributed import broadcast_object_list as share\nshare([x])", 1),
        ("import torch.distributed._functional_collectives as funcol\nfuncol.all_gather_tensor(x, 0, g)", 1),
        ("import torch.distributed as dist\nwork = functools.partial(dist.reduce_scatter_tensor, x)", 1),
        ("import torch.distributed as dist\ndist.get_rank(), dist.new_group(), dist.is_initialized()", 0),
        ("from dispatchers.collectives import all_to_all_rows\nall_to_all_rows(x)", 0),
        ("from einops import reduce\nreduce(x.gather(0, i), 't h -> t', 'sum')\ntorch.broadcast_to(x, s)", 0),
    ],
)
def test_collective_calls_are_found(source: str, num_calls: int) -> None:
    assert len(collective_calls("moe/a.py", source)) == num_calls


def test_state_faults_are_found() -> None:
    source = "def f(x):\n    global seen\n    x.data = y\n    x.data[0] = 1\n    x.data.copy_(y)\n    x.data_ptr()"
    assert [fault.split(": ")[1] for fault in state_faults("moe/a.py", source)] == ["global seen", *["x.data"] * 3]


def test_missing_docstrings_are_found() -> None:
    method = "    def run(self): ...\n    def backward(self): ...\n    def _own(self): ...\n"
    source = f"def f(): ...\ndef _f(): ...\nclass A:\n    '''Yes.'''\n{method}class _B:\n{method}class C:\n    x = 1\n"
    assert missing_docstrings("moe/a.py", source) == ["moe/a.py", "moe/a.py: f", "moe/a.py: A: run", "moe/a.py: C"]


def test_machine_paths_are_found() -> None:
    folder = "/".join(["", "home", "someone"])
    assert MACHINE_PATH.search(f'open("{folder}/data")')
    assert not MACHINE_PATH.search("https://example.org/home/page and docs/home/page")
