"""Every test here needs peers from PyPI, which `make test-parity` installs."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if "tests/parity/" in item.path.as_posix():
            item.add_marker(pytest.mark.parity)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # of the peers


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone: Megatron-Core reduces over one even then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
