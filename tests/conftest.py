"""Settings of every test: seeded, one thread, GPU tests skipped where there is no GPU."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread, so that ranks share the cores, and the same examples in every run."""
    torch.set_num_threads(1)
    settings.load_profile("seeded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where PyTorch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
