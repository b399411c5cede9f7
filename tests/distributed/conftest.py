"""Settings of tests that may run in place under torchrun, where one process builds many groups after each other."""

from collections.abc import Iterator

import pytest
from torch.distributed.tensor import debug


@pytest.fixture(autouse=True)
def _forget_meshes() -> Iterator[None]:
    """Clear DTensor's caches after a test: they hold meshes, equal to later ones, whose groups are gone."""
    yield
    debug._clear_sharding_prop_cache()
