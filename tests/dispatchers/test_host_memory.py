"""Memory for rows: what is asked of the system, and when nothing is."""

import mmap

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatchers import gather_rows, host_memory, sum_rows
from dispatchers.host_memory import SMALLEST_ADVISED, advise_huge_pages, new_rows

PAGE = mmap.PAGESIZE


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Addresses and lengths for which huge pages are asked."""
    calls: list[tuple[int, int]] = []

    def madvise(address: int, length: int, advice: int) -> int:
        calls.append((address, length))
        return 0

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(host_memory, "_madvise", lambda: madvise)
    return calls


def test_large_rows_alone_are_advised(advised: list[tuple[int, int]]) -> None:
    small = new_rows((SMALLEST_ADVISED // 4 - 1,), torch.float32, torch.device("cpu"))
    assert not advised
    large = new_rows((SMALLEST_ADVISED // 64, 16), torch.float32, torch.device("cpu"))
    assert (small.shape, large.shape, large.dtype) == ((SMALLEST_ADVISED // 4 - 1,), (65536, 16), torch.float32)
    ((address, length),) = advised
    assert large.data_ptr() <= address < address + length <= large.data_ptr() + large.nbytes


def test_whole_pages_of_the_block_are_advised(advised: list[tuple[int, int]]) -> None:
    assert advise_huge_pages(10 * PAGE + 64, 5 * PAGE) == 0
    advise_huge_pages(10 * PAGE, 5 * PAGE)
    assert advised == [(11 * PAGE, 4 * PAGE), (10 * PAGE, 5 * PAGE)]


def test_where_there_is_nothing_to_ask_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_madvise", lambda: None)
    assert advise_huge_pages(0, 1 << 22) is None
    assert new_rows((2, SMALLEST_ADVISED), torch.int8, torch.device("cpu")).shape == (2, SMALLEST_ADVISED)


def test_memory_that_is_not_there_is_not_advised(advised: list[tuple[int, int]]) -> None:
    assert new_rows((1 << 40,), torch.float32, torch.device("meta")).is_meta
    with FakeTensorMode():
        assert new_rows((SMALLEST_ADVISED,), torch.float32, torch.device("cpu")).shape == (SMALLEST_ADVISED,)
    assert not advised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_large_enough_to_be_advised_keep_their_values(dtype: torch.dtype, advised: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(256, 1024, generator=generator).to(dtype).requires_grad_()
    row_ids = torch.randint(0, 256, (4096,), generator=generator)
    rows: Tensor = gather_rows(source, row_ids)  # [4096, 1024]
    assert advised
    assert torch.equal(rows, source[row_ids])
    total = sum_rows(rows, row_ids, 256)
    counts = torch.bincount(row_ids, minlength=256).unsqueeze(1)
    torch.testing.assert_close(total, source * counts, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    total.sum().backward()
    assert source.grad is not None
    assert torch.equal(source.grad, counts.expand(256, 1024).to(dtype))
