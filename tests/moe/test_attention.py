"""Attention, rotary embedding and RMSNorm against loops written by hand in fp64."""

import math

import pytest
import torch
from torch import Tensor

from moe.attention import RMSNorm, SelfAttention, rotary_embedding
from moe.config import TransformerConfig
from tests.tolerances import assert_close

SEQUENCE, BATCH, HIDDEN, HEADS, HEAD = 5, 3, 12, 6, 4


def config(**changes: object) -> TransformerConfig:
    return TransformerConfig(
        **{
            "hidden_size": HIDDEN,
            "num_moe_experts": 2,
            "moe_ffn_hidden_size": 7,
            "num_layers": 1,
            "num_attention_heads": HEADS,
            "kv_channels": HEAD,
            "vocab_size": 11,
            "params_dtype": torch.float64,
            **changes,
        }
    )


def rotate(vector: Tensor, position: int, base: float) -> Tensor:
    """Multiply the complex numbers x_i + i x_{i + D/2} by exp(i position base^(-2i / D)): [D] -> [D]."""
    half = len(vector) // 2
    angles = torch.tensor([position * base ** (-2 * i / len(vector)) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def attention_loop(attention: SelfAttention, hidden_states: Tensor, base: float) -> Tensor:
    """One query, one head, one earlier position after another."""
    num_groups, weight = attention.num_groups, attention.linear_qkv.weight
    bias = 0 if attention.linear_qkv.bias is None else attention.linear_qkv.bias
    output = []
    for s in range(SEQUENCE):
        for b in range(BATCH):
            heads = []
            rows = [(weight @ hidden_states[j, b] + bias).split(HEAD) for j in range(s + 1)]
            for h in range(HEADS):
                group, member = divmod(h, HEADS // num_groups)
                first = group * (HEADS // num_groups + 2)  # a group's query heads, its key, its value
                key_row, value_row = first + HEADS // num_groups, first + HEADS // num_groups + 1
                query = rotate(rows[s][first + member], s, base)
                keys = [rotate(rows[j][key_row], j, base) for j in range(s + 1)]
                scores = torch.stack([query @ key / math.sqrt(HEAD) for key in keys]).softmax(0)
                heads.append(sum(p * row[value_row] for p, row in zip(scores, rows, strict=True)))
            output.append(torch.cat(heads) @ attention.linear_proj.weight.T)
    projected = torch.stack(output).view(SEQUENCE, BATCH, HIDDEN)
    return projected if attention.linear_proj.bias is None else projected + attention.linear_proj.bias


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("num_groups", [None, 1, 2, 3])
def test_attention_equals_the_loop(num_groups: int | None, biases: bool) -> None:
    attention = SelfAttention(config(num_query_groups=num_groups, rotary_base=100.0, add_bias_linear=biases))
    hidden_states = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    leaves, grad = [hidden_states, *attention.parameters()], torch.randn(SEQUENCE, BATCH, HIDDEN).double()
    actual, expected = attention(hidden_states), attention_loop(attention, hidden_states, 100.0)
    assert_close(actual, expected, what="output")
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    for actual_grad, expected_grad in zip(torch.autograd.grad(actual, leaves, grad), expected_grads, strict=True):
        assert_close(actual_grad, expected_grad)


def test_attention_is_causal() -> None:
    attention = SelfAttention(config(num_query_groups=2))
    hidden_states = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64)
    changed = hidden_states.clone()
    changed[3] += 1
    before, after = attention(hidden_states), attention(changed)
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] != after[3:]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotary_embedding_equals_a_complex_product(dtype: torch.dtype) -> None:
    states = torch.randn(BATCH, 2, 9, 8).to(dtype)
    actual = rotary_embedding(states, 50.0)
    expected = [rotate(states[b, h, s].double(), s, 50.0) for b in range(BATCH) for h in range(2) for s in range(9)]
    assert_close(actual, torch.stack(expected).view(states.shape), dtype)


def test_rotary_scores_depend_on_relative_positions_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 9, 8)
    scores = rotary_embedding(query, 50.0)[0, 0] @ rotary_embedding(key, 50.0)[0, 0].T  # [9, 9]
    for offset in range(-8, 9):
        diagonal = scores.diagonal(offset)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert len({round(score, 9) for score in scores[0].tolist()}) == 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_by_hand(dtype: torch.dtype) -> None:
    norm = RMSNorm(config(params_dtype=dtype, layernorm_epsilon=0.5))
    torch.nn.init.normal_(norm.weight)
    hidden_states = torch.randn(SEQUENCE, BATCH, HIDDEN).to(dtype)
    x = hidden_states.double()
    expected = x / (x.square().sum(-1, keepdim=True) / HIDDEN + 0.5).sqrt() * norm.weight.double()
    assert_close(norm(hidden_states), expected, dtype)
    assert norm(hidden_states).dtype == dtype
    # 300^2 overflows fp16's 65504 unless squares are taken in fp32.
    half = RMSNorm(config(params_dtype=torch.float16))
    assert_close(half(torch.full((HIDDEN,), 300.0).half()), torch.ones(HIDDEN), torch.float16)
