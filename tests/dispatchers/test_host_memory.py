"""Memory for large tensors: what is used again, what never is while somebody looks at it, and how much is held."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatchers import gather_rows, host_memory, sum_rows
from dispatchers.host_memory import SMALLEST_KEPT, HostMemory, new_tensor, release_host_memory

CPU = torch.device("cpu")
LARGE = (SMALLEST_KEPT // 64, 16)  # fp32, one block of the smallest size


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """A HostMemory of this test's own."""
    own = HostMemory()
    monkeypatch.setattr(host_memory, "HOST_MEMORY", own)
    return own


def large(fill: float) -> Tensor:
    return new_tensor(LARGE, torch.float32, CPU).fill_(fill)


def test_memory_of_a_dead_tensor_is_used_again_and_small_ones_are_left_to_torch(memory: HostMemory) -> None:
    first = large(1)
    address = first.data_ptr()
    assert (first.shape, first.stride(), first.is_contiguous(), first._is_view()) == (LARGE, (16, 1), True, False)
    del first
    assert large(2).data_ptr() == address
    assert memory.held_bytes == SMALLEST_KEPT
    assert new_tensor((SMALLEST_KEPT // 4 - 1,), torch.float32, CPU).numel() == SMALLEST_KEPT // 4 - 1
    assert new_tensor((), torch.int64, CPU).shape == ()
    assert memory.held_bytes == SMALLEST_KEPT


KEEPERS: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda t: t,
    "a view": lambda t: t[3:5, 1],
    "a detached alias": lambda t: t.detach(),
    "another dtype": lambda t: t.view(torch.int32),
    "its storage": lambda t: t.untyped_storage(),
    "a typed storage": lambda t: t.storage(),
    "a parameter": lambda t: nn.Parameter(t),
    "a graph": lambda t: t.requires_grad_().exp(),
    "a view's graph": lambda t: nn.Parameter(torch.ones(16)) * t[0],
    "an iterator": lambda t: iter(t),
    "a DLPack capsule": lambda t: torch.utils.dlpack.to_dlpack(t),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("keeper", KEEPERS)
def test_whoever_keeps_a_tensor_keeps_its_values(keeper: str, memory: HostMemory) -> None:
    tensor = large(1)
    kept: object = KEEPERS[keeper](tensor)
    address, copy = tensor.data_ptr(), tensor.detach().clone()
    del tensor
    others = [large(2), large(3)]
    assert all(other.data_ptr() != address for other in others)
    assert memory.release() == 0
    if isinstance(kept, Tensor) and kept.shape == LARGE and kept.dtype == torch.float32:
        assert torch.equal(kept.detach(), copy if keeper != "a graph" else copy.exp())
    del kept, others
    assert memory.release() == memory.most_used + 3 * SMALLEST_KEPT


@pytest.mark.parametrize("change", ["shared", "emptied", "grown"])
def test_a_storage_that_was_shared_or_resized_is_not_lent_again(change: str, memory: HostMemory) -> None:
    tensor = large(1)
    if change == "shared":
        tensor.share_memory_()  # as torch.multiprocessing does; the other process may keep it longer than this one
    else:
        tensor.untyped_storage().resize_(0 if change == "emptied" else 2 * SMALLEST_KEPT)
    kept = tensor.untyped_storage().data_ptr()
    del tensor
    others = [large(2), large(3)]
    assert all(other.untyped_storage().nbytes() == SMALLEST_KEPT for other in others)
    assert all(other.data_ptr() != kept or change != "shared" for other in others)
    assert not any(other.untyped_storage().is_shared() for other in others)
    assert memory.held_bytes == 2 * SMALLEST_KEPT


def test_gradients_stay_as_long_as_the_parameter_has_them() -> None:
    class Large(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, weight: Tensor, value: float) -> Tensor:
            ctx.value = value  # type: ignore[attr-defined]
            return weight.sum()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
            return large(ctx.value), None  # type: ignore[attr-defined]

    weight = nn.Parameter(torch.zeros(LARGE))
    Large.apply(weight, 1.0).backward()
    assert weight.grad is not None
    address = weight.grad.data_ptr()  # autograd took the tensor itself
    Large.apply(weight, 2.0).backward()
    assert weight.grad.data_ptr() == address
    assert weight.grad.unique().tolist() == [3.0]
    kept, weight.grad = weight.grad, None
    Large.apply(weight, 4.0).backward()
    assert (kept.unique().tolist(), weight.grad.unique().tolist()) == ([3.0], [4.0])


def test_no_more_is_held_than_was_in_use_at_one_time(memory: HostMemory) -> None:
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(200):
        sizes = torch.randint(1, 5 * SMALLEST_KEPT, (3,), generator=generator).tolist()
        tensors = [new_tensor((size,), torch.uint8, CPU) for size in sizes]
        most = max(most, sum(size + size // 32 + 1 for size in sizes if size >= SMALLEST_KEPT))
        del tensors
        assert memory.held_bytes <= 1.25 * most  # a block may be larger than what it serves
    held = memory.held_bytes
    assert memory.release() == held > 0
    assert memory.held_bytes == memory.most_used == 0


def test_sizes_that_vary_a_little_share_a_block(memory: HostMemory) -> None:
    for extra in range(0, SMALLEST_KEPT // 10, 4096):
        new_tensor((2 * SMALLEST_KEPT + extra,), torch.uint8, CPU)
    assert memory.held_bytes <= 2.2 * SMALLEST_KEPT


def test_a_small_tensor_does_not_hold_a_much_larger_block(memory: HostMemory) -> None:
    new_tensor((16 * SMALLEST_KEPT,), torch.uint8, CPU)
    small = large(1)
    assert memory.most_used == 16 * SMALLEST_KEPT
    assert memory.held_bytes == SMALLEST_KEPT  # the large block would have made it more than was ever in use
    assert small.untyped_storage().nbytes() == SMALLEST_KEPT


def test_threads_never_get_the_same_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            tensors = [large(number) for _ in range(3)]
            wrong.extend(number for tensor in tensors if not bool(tensor.eq(number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_devices_modes_and_deterministic_torch_get_torchs_own(memory: HostMemory) -> None:
    assert new_tensor((1 << 40,), torch.float32, torch.device("meta")).is_meta
    with FakeTensorMode():
        assert new_tensor(LARGE, torch.float32, CPU).shape == LARGE
    torch.use_deterministic_algorithms(True)
    try:
        assert new_tensor(LARGE, torch.float32, CPU).isnan().all()  # torch fills it, so that unwritten values show
    finally:
        torch.use_deterministic_algorithms(False)
    assert memory.held_bytes == 0
    with torch.inference_mode():
        assert large(1).is_inference()
    assert not large(2).is_inference()


def test_release_host_memory(memory: HostMemory) -> None:
    kept = large(1)
    large(2)
    assert release_host_memory() == SMALLEST_KEPT
    assert memory.held_bytes == SMALLEST_KEPT
    del kept
    assert release_host_memory() == SMALLEST_KEPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_used_memory_have_their_own_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(256, 1024, generator=generator).to(dtype).requires_grad_()
    counts = torch.zeros(256, 1)
    for _ in range(2):
        row_ids = torch.randint(0, 256, (4096,), generator=generator)
        rows = gather_rows(source, row_ids)  # [4096, 1024]
        assert torch.equal(rows, source[row_ids])
        total = sum_rows(rows, row_ids, 256)
        counts = torch.bincount(row_ids, minlength=256).unsqueeze(1)
        torch.testing.assert_close(total, source * counts, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
        (grad,) = torch.autograd.grad(total.sum(), source)
        assert torch.equal(grad, counts.expand(256, 1024).to(dtype))
