"""The transformer block: its two residual branches, its choice of MLP, and what it refuses."""

from dataclasses import dataclass, replace

import pytest
import torch

from moe.block import MoETransformerBlock
from moe.config import TransformerConfig
from moe.layer import MoELayer
from moe.parallel import ProcessGroups
from moe.shared_experts import MLP
from tests.tolerances import assert_close

CONFIG = TransformerConfig(
    hidden_size=12,
    num_moe_experts=4,
    moe_ffn_hidden_size=7,
    num_layers=3,
    num_attention_heads=3,
    num_query_groups=1,
    vocab_size=11,
    params_dtype=torch.float64,
    moe_router_dtype="fp64",
    moe_layer_freq=(1, 0, 1),
    init_method_std=0.4,
)


@dataclass
class GroupOfTwo:
    """Stands for a group of two ranks."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_residual_branches_behind_norms(number: int) -> None:
    block = MoETransformerBlock(CONFIG, layer_number=number)
    assert isinstance(block.mlp, MLP if number == 2 else MoELayer)
    for norm in (block.input_layernorm, block.pre_mlp_layernorm):
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 12, dtype=torch.float64)
    first = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.input_layernorm.weight
    y = x + block.self_attention(first)
    second = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.pre_mlp_layernorm.weight
    assert_close(block(x), y + block.mlp(second))


@pytest.mark.parametrize(("given", "width"), [(None, 48), (9, 9)])
def test_the_dense_width(given: int | None, width: int) -> None:
    block = MoETransformerBlock(replace(CONFIG, ffn_hidden_size=given), layer_number=2)
    assert block.mlp.linear_fc1.weight.shape == (2, width, 12)


def test_a_moe_layer_shows_the_number_of_its_block() -> None:
    assert "MoELayer 3:" in MoETransformerBlock(CONFIG, layer_number=3).mlp.describe()


@pytest.mark.parametrize(
    ("group", "changes", "message"),
    [
        ("cp", {}, r"context_parallel_size \(2\) must be 1 for a MoETransformerBlock"),
        ("tp", {}, r"tensor_model_parallel_size \(2\) needs sequence_parallel \(False\)"),
        ("tp", {"sequence_parallel": True}, r"num_query_groups \(1\) must be divisible by tensor_model_.* \(2\)"),
        ("tp", {"sequence_parallel": True, "num_query_groups": None}, r"num_attention_heads \(3\) must be divisible"),
    ],
)
def test_what_cannot_be_split_is_refused(group: str, changes: dict[str, object], message: str) -> None:
    groups = replace(ProcessGroups.build(), **{group: GroupOfTwo()})
    with pytest.raises(ValueError, match=message):
        MoETransformerBlock(replace(CONFIG, **changes), groups)
