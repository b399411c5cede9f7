"""The vocabulary in parts: embedding and cross-entropy against torch's on the whole, value and gradient."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from moe import ProcessGroups
from moe.tensor_parallel import embed, sequence_slice, shard_vocabulary, vocab_parallel_cross_entropy
from tests.ranks import run_ranks
from tests.tolerances import assert_close

NUM, VOCAB, IGNORED = 13, 12, -100


def cross_entropy_worker(dtype: torch.dtype) -> None:
    groups = ProcessGroups.build(tensor_model_parallel_size=dist.get_world_size())
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(NUM) % VOCAB  # the first and the last id of every rank's part
    some_ignored = targets.masked_fill(torch.rand(NUM, generator=generator) < 0.4, IGNORED)
    for factor in (1.0, 0.0, 3e4):  # of ordinary size, all alike, beyond where exp overflows
        for labels in (targets, some_ignored, torch.full_like(targets, IGNORED)):
            whole = (torch.randn(NUM, VOCAB, generator=generator) * factor).to(dtype).requires_grad_()
            part = whole.detach().chunk(groups.tp.size(), 1)[groups.tp.rank()].clone().requires_grad_()
            wide = whole.to(torch.promote_types(dtype, torch.float32))
            expected = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
            (2.5 * expected).backward()
            loss = vocab_parallel_cross_entropy(part, labels, groups, IGNORED)
            (2.5 * loss).backward()
            assert loss.dtype == expected.dtype
            assert part.grad is not None
            assert whole.grad is not None
            assert_close(loss, expected, what=f"loss at {factor}")
            share = whole.grad.chunk(groups.tp.size(), 1)[groups.tp.rank()]
            assert_close(part.grad, share, dtype, what=f"gradient at {factor}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4])
def test_cross_entropy_equals_that_of_the_whole_vocabulary(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(cross_entropy_worker, world_size, dtype)


class Vocabulary(nn.Module):
    """What MoEGPT shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(VOCAB, 6, dtype=torch.float64)
        self.output_layer = nn.Linear(6, VOCAB, bias=False, dtype=torch.float64)


def embedding_worker() -> None:
    groups, model, whole = ProcessGroups.build(tensor_model_parallel_size=2), Vocabulary(), Vocabulary()
    shard_vocabulary(model, groups)
    tokens = torch.tensor([[0, 5], [6, 11], [5, 5], [11, 3]])  # [S, B]
    states = embed(tokens, model.embedding, groups)
    expected = whole.embedding(tokens)
    assert_close(states, sequence_slice(expected, groups))
    logits = model.output_layer(states)  # [S, B, V / 2]
    weight = torch.arange(1.0, 1 + 4 * 2 * VOCAB, dtype=torch.float64).view(4, 2, VOCAB)
    (logits * weight.chunk(2, -1)[groups.tp.rank()]).sum().backward()
    (whole.output_layer(expected) * weight).sum().backward()
    for (name, parameter), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.placements == parameter.placements, name  # no rank holds rows of another's
        assert_close(parameter.grad.full_tensor(), reference.grad, what=name)
    for wrong in (VOCAB, -1):
        with pytest.raises(IndexError, match=r"token ids must lie from 0 to 11"):
            embed(tokens.masked_fill(tokens == 3, wrong), model.embedding, groups)
        with pytest.raises(IndexError, match=r"labels must lie from 0 to 11"):
            vocab_parallel_cross_entropy(logits.flatten(0, 1), torch.full((8,), wrong), groups, IGNORED)
        vocab_parallel_cross_entropy(logits.flatten(0, 1), torch.full((8,), -1), groups, -1)  # no label at all
    with pytest.raises(ValueError, match=r"labels \(7, torch.int64\) must be int64, one for each of 8 tokens"):
        vocab_parallel_cross_entropy(logits.flatten(0, 1), tokens.flatten()[1:], groups, -1)
    with pytest.raises(ValueError, match=r"A micro-batch without sequences \(B = 0\) has no meaning"):
        sequence_slice(tokens[:, :0], groups)
    with pytest.raises(ValueError, match=r"sequence length \(3\) must be divisible by .*\(2\); pad it to 4"):
        sequence_slice(tokens[:3], groups)


def test_the_vocabulary_in_parts_equals_the_whole() -> None:
    run_ranks(embedding_worker, 2)
