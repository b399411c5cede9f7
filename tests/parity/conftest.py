"""Every test here needs peers from PyPI, which `make test-parity` installs. Without them these tests fail, not skip.

Peers are imported by fixtures, not by modules, so that collecting the whole test suite needs none of them.
"""

import importlib.util
import types
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.parity import megatron


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if "tests/parity/" in item.path.as_posix():
            item.add_marker(pytest.mark.parity)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # of the peers


def missing_peers() -> list[str]:
    """Return the names of the peers that are not here."""
    found = {
        name: (megatron.FOLDER.parent / name).is_dir()
        for name in ("megatron_core", "transformer_engine", "torchtitan", "triton")
    }
    found |= {name: importlib.util.find_spec(name) is not None for name in ("transformers", "torchao", "tyro")}
    return [name for name, is_here in found.items() if not is_here]


@pytest.fixture(scope="session", autouse=True)
def _peers() -> None:
    if missing := missing_peers():
        pytest.fail(
            f"{', '.join(missing)}: not here. Run these tests with `make test-parity`, which fetches the peers."
        )


@pytest.fixture(scope="session")
def theirs(_peers: None) -> types.ModuleType:
    """megatron.core.transformer.moe.moe_utils."""
    return megatron.load("transformer.moe.moe_utils")


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone: Megatron-Core reduces over one even then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
