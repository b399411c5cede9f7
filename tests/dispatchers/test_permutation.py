"""Row orders inside one rank: hand-written cases, round trips, sums in fp32, 64-bit offsets."""

import pytest
import torch
from torch import Tensor

from dispatchers import gather_rows, permute, sort_chunks_by_idxs, sum_rows, unpermute
from dispatchers.permutation import (
    CAST_ROWS,
    column_counts,
    expert_major,
    pad_slots,
    routed_slots,
    slot_probs,
    sum_dtype,
)
from tests.new_tensors import NewTensors

# t0 -> e0 e2, t1 -> e2, t2 -> e0 e1; the slots are e0: t0 t2 | e1: t2 | e2: t0 t1
ROUTING_MAP = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=torch.bool)
TOKEN_OF_SLOT = [0, 2, 2, 0, 1]
PROBS = [[0.1, 0.0, 0.3], [0.0, 0.0, 0.6], [0.7, 0.8, 0.0]]
TOKENS = [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]


def leaf(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("num_out_tokens", [None, 5])
def test_permute_by_hand(num_out_tokens: int | None) -> None:
    tokens, probs = leaf(TOKENS), leaf(PROBS)
    rows, row_probs, sorted_indices = permute(tokens, ROUTING_MAP, probs, num_out_tokens)
    assert sorted_indices.tolist() == TOKEN_OF_SLOT
    assert sorted_indices.dtype == torch.int64
    assert rows.tolist() == [[1, 10], [3, 30], [3, 30], [1, 10], [2, 20]]
    assert row_probs is not None
    assert row_probs.tolist() == [0.1, 0.7, 0.8, 0.3, 0.6]
    rows.backward(torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 1], [5, 0]], dtype=torch.float64))
    assert tokens.grad is not None
    assert tokens.grad.tolist() == [[5, 1], [5, 0], [5, 0]]
    row_probs.backward(torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64))
    assert probs.grad is not None
    assert probs.grad.tolist() == [[1, 0, 4], [0, 0, 5], [2, 3, 0]]


def test_permute_without_probs_and_with_a_strided_map() -> None:
    rows, row_probs, _ = permute(leaf(TOKENS), ROUTING_MAP.t().contiguous().t())
    assert rows.tolist() == [TOKENS[t] for t in TOKEN_OF_SLOT]
    assert row_probs is None


def test_unpermute_by_hand() -> None:
    rows = leaf([[1.0, 0], [2, 0], [3, 1], [4, 0], [5, 0]])
    tokens = unpermute(rows, torch.tensor(TOKEN_OF_SLOT), (3, 2))
    assert tokens.tolist() == [[5, 0], [5, 0], [5, 1]]
    tokens.backward(torch.tensor([[10.0, 0], [20, 0], [30, 7]], dtype=torch.float64))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[10, 0], [30, 7], [30, 7], [10, 0], [20, 0]]


def test_unpermute_weights_by_probs() -> None:
    rows, probs = leaf([[1.0], [2], [3], [4], [5]]), leaf([[0.5, 0, 2], [0, 0, 3], [0.25, 4, 0]])
    tokens = unpermute(rows, torch.tensor(TOKEN_OF_SLOT), (3, 1), probs, ROUTING_MAP)
    assert tokens.tolist() == [[0.5 * 1 + 2 * 4], [3 * 5], [0.25 * 2 + 4 * 3]]
    tokens.backward(torch.tensor([[1.0], [10], [100]], dtype=torch.float64))
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0.5], [25], [400], [2], [30]]
    assert probs.grad is not None
    assert probs.grad.tolist() == [[1, 0, 4], [0, 0, 50], [200, 300, 0]]


def test_unpermute_with_probs_needs_the_map() -> None:
    with pytest.raises(ValueError, match="need routing_map"):
        unpermute(leaf([[1.0]]), torch.tensor([0]), (1, 1), leaf([[1.0]]))


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "density"), [(0, 3, 1.0), (1, 5, 0.5), (9, 4, 0.0), (11, 7, 0.4)]
)
def test_permute_and_unpermute_give_each_token_times_its_experts(
    num_tokens: int, num_experts: int, density: float
) -> None:
    tokens = torch.randn(num_tokens, 3, dtype=torch.float64)
    routing_map = torch.rand(num_tokens, num_experts) < density
    rows, _, sorted_indices = permute(tokens, routing_map)
    assert rows.shape[0] == int(routing_map.sum())
    restored = unpermute(rows, sorted_indices, tokens.shape)
    torch.testing.assert_close(restored, tokens * routing_map.sum(1, keepdim=True), rtol=1e-15, atol=0)
    once = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    once[:, num_experts // 2] = True
    rows, _, sorted_indices = permute(tokens, once)
    assert torch.equal(unpermute(rows, sorted_indices, tokens.shape), tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    # Added one after the other in the dtype, 1 is lost against the large number each time.
    large = 2.0 / torch.finfo(dtype).eps
    values = torch.tensor([[large], [1], [1], [1], [1]], dtype=dtype)
    assert (values[0] + 1).item() == large
    row_ids = torch.tensor([1, 1, 1, 1, 1])
    total = torch.tensor(large + 4).to(dtype).item()
    assert total > large
    assert sum_rows(values, row_ids, 3).tolist() == [[0], [total], [0]]
    source = torch.zeros(3, 1, dtype=dtype, requires_grad=True)
    gather_rows(source, row_ids).backward(values)
    assert source.grad is not None
    assert source.grad.tolist() == [[0], [total], [0]]


@pytest.mark.parametrize("num_rows", [0, CAST_ROWS - 1, CAST_ROWS, 2 * CAST_ROWS + 3])
def test_rows_cast_in_parts_add_up_as_one_cast(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, 3, generator=generator).bfloat16()
    row_ids = torch.randint(0, 5, (num_rows,), generator=generator)
    expected = torch.zeros(5, 3).index_add_(0, row_ids, rows.float()).bfloat16()
    assert torch.equal(sum_rows(rows, row_ids, 5), expected)
    with NewTensors((CAST_ROWS + 1) * 3) as made:
        sum_rows(rows, row_ids, 5)
    assert not made.operations


def test_integers_add_up_exactly() -> None:
    large = 1 << 53
    assert sum_rows(torch.tensor([[large], [1]]), torch.tensor([0, 0]), 1).tolist() == [[large + 1]]


def test_sum_dtype() -> None:
    narrow = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        assert sum_dtype(dtype) == narrow.get(dtype, dtype)


def test_no_rows() -> None:
    source = torch.zeros(0, 3, requires_grad=True)
    rows = gather_rows(source, torch.zeros(0, dtype=torch.int64))
    tokens = sum_rows(rows, torch.zeros(0, dtype=torch.int64), 4)
    assert tokens.tolist() == [[0.0] * 3] * 4
    tokens.sum().backward()
    assert source.grad is not None
    assert source.grad.shape == (0, 3)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_sort_chunks_by_hand(as_tensor: bool) -> None:
    # chunks: a | b b | (empty) | c -> (empty) c a b b
    rows, probs = leaf([[1.0, 0], [2, 0], [3, 0], [4, 1]]), leaf([0.1, 0.2, 0.3, 0.4])
    split_sizes, sorted_idxs = [1, 2, 0, 1], [2, 3, 0, 1]
    output, sorted_probs = (
        sort_chunks_by_idxs(rows, torch.tensor(split_sizes), torch.tensor(sorted_idxs), probs)
        if as_tensor
        else sort_chunks_by_idxs(rows, split_sizes, sorted_idxs, probs)
    )
    assert output.tolist() == [[4, 1], [1, 0], [2, 0], [3, 0]]
    assert sorted_probs is not None
    assert sorted_probs.tolist() == [0.4, 0.1, 0.2, 0.3]
    (output[:, 0] @ torch.tensor([1.0, 2, 3, 4], dtype=torch.float64) + sorted_probs[0] * 7).backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[2, 0], [3, 0], [4, 0], [1, 0]]
    assert probs.grad is not None
    assert probs.grad.tolist() == [0, 0, 0, 7]


def test_sort_chunks_of_nothing() -> None:
    output, probs = sort_chunks_by_idxs(torch.zeros(0, 2), [], [])
    assert output.shape == (0, 2)
    assert probs is None
    output, probs = sort_chunks_by_idxs(torch.zeros(0, 2), [0, 0], [1, 0], torch.zeros(0))
    assert output.shape == (0, 2)
    assert probs is not None
    assert probs.shape == (0,)


@pytest.mark.parametrize(
    ("split_sizes", "sorted_idxs", "text"),
    [
        ([1, 1], [0, 1], r"split_sizes \(\[1, 1\]\) must be >= 0 and sum to the rows of input \(3\)"),
        ([4, -1], [0, 1], r"split_sizes \(\[4, -1\]\) must be >= 0"),
        ([1, 2], [0, 0], r"sorted_idxs \(\[0, 0\]\) must be a permutation of the 2 chunks"),
        ([1, 2], [0], r"sorted_idxs \(\[0\]\) must be a permutation of the 2 chunks"),
        ([1, 2], [0, 2], "permutation of the 2 chunks"),
    ],
)
def test_sort_chunks_refuses(split_sizes: list[int], sorted_idxs: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sort_chunks_by_idxs(torch.zeros(3, 1), split_sizes, sorted_idxs)


def test_expert_major_by_hand() -> None:
    # arrived: r0e0 r0e1 r0e1 r1e0 r1e1
    assert expert_major(torch.tensor([[1, 2], [1, 1]]), 5).tolist() == [0, 3, 1, 2, 4]
    # arrived: r0e1 r0e1 r2e0 r2e2; rank 1 sends nothing
    assert expert_major(torch.tensor([[0, 2, 0], [0, 0, 0], [1, 0, 1]]), 4).tolist() == [2, 0, 1, 3]
    assert expert_major(torch.zeros(2, 3, dtype=torch.int64), 0).tolist() == []


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 5)])
def test_expert_major_sort_the_rows_by_expert_then_source(shape: tuple[int, int]) -> None:
    counts = torch.randint(0, 4, shape)
    arrived = [(e, r, i) for r in range(shape[0]) for e in range(shape[1]) for i in range(int(counts[r, e]))]
    row_ids = expert_major(counts, len(arrived))
    assert row_ids.dtype == torch.int64
    assert [arrived[i] for i in row_ids.tolist()] == sorted(arrived)


def test_pad_slots_by_hand() -> None:
    # e0: 5 7 | e1: nothing | e2: 6, each padded to a multiple of 2
    probs = leaf([0.1, 0.2, 0.3])
    counts, padded = torch.tensor([2, 0, 1]), torch.tensor([2, 0, 2])
    row_ids, padded_probs = pad_slots(torch.tensor([5, 7, 6]), probs, counts, padded, 4)
    assert row_ids.tolist() == [5, 7, 6, -1]
    assert row_ids.dtype == torch.int64
    assert padded_probs.tolist() == [0.1, 0.2, 0.3, 0]
    padded_probs.backward(torch.tensor([1.0, 2, 3, 9], dtype=torch.float64))
    assert probs.grad is not None
    assert probs.grad.tolist() == [1, 2, 3]
    # to a multiple of 3: e0: 5 7 - | e2: 6 - -
    row_ids, _ = pad_slots(torch.tensor([5, 7, 6]), leaf([0.1, 0.2, 0.3]), counts, torch.tensor([3, 0, 3]), 6)
    assert row_ids.tolist() == [5, 7, -1, 6, -1, -1]


def test_ids_and_offsets_do_not_wrap_in_32_bits() -> None:
    num_tokens, num_experts = 1 << 31, 4  # virtual: one element, strides 0
    probs = torch.tensor([[0.25]]).expand(num_tokens, num_experts)
    token_ids, expert_ids = torch.tensor([0, num_tokens - 1]), torch.tensor([0, 3])
    assert slot_probs(probs, token_ids, expert_ids).tolist() == [0.25, 0.25]
    source = torch.tensor([[0.5]]).expand((1 << 33) + 1, 1 << 12)
    assert torch.equal(gather_rows(source, torch.tensor([1 << 33])), torch.full((1, 1 << 12), 0.5))
    for ids in routed_slots(ROUTING_MAP):
        assert ids.dtype == torch.int64


def test_sizes_beyond_32_bits_go_through_in_shape() -> None:
    num_slots = (1 << 32) + 5
    with torch.device("meta"):
        row_ids = torch.empty(num_slots, dtype=torch.int64)
        rows = gather_rows(torch.empty(1 << 31, 1 << 12, dtype=torch.bfloat16), row_ids)
        assert rows.shape == (num_slots, 1 << 12)
        assert sum_rows(rows, row_ids, 1 << 31).shape == (1 << 31, 1 << 12)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 96, 257, 512])
def test_column_counts_hold_more_than_a_byte(num_tokens: int) -> None:
    routing_map = torch.rand(num_tokens, 5) < 0.7
    routing_map[:, 1], routing_map[:, 3] = True, False
    counts = column_counts(routing_map)
    assert (counts.dtype, counts[1].item(), counts[3].item()) == (torch.int64, num_tokens, 0)
    assert counts.tolist() == [sum(column) for column in routing_map.t().tolist()]
    assert torch.equal(column_counts(routing_map[:, 1:4]), counts[1:4])  # columns of a wider map
    assert torch.equal(column_counts(routing_map.t().contiguous().t()), counts)


def test_slot_probs_make_one_dense_tensor_in_backward() -> None:
    probs = leaf(PROBS)
    token_ids, expert_ids = routed_slots(ROUTING_MAP, 5)
    weights = slot_probs(probs, token_ids, expert_ids)
    assert weights.tolist() == [0.1, 0.7, 0.8, 0.3, 0.6]
    with NewTensors(probs.numel()) as made:
        (gradient,) = torch.autograd.grad(weights, probs, torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64))
    assert gradient.tolist() == [[1, 0, 4], [0, 0, 5], [2, 3, 0]]
    assert made.operations == ["new_zeros"]
