"""MoETransformerBlock: attention and experts (or a dense MLP), each behind a norm and a residual."""

from __future__ import annotations

from torch import Tensor, nn

from moe.attention import RMSNorm, SelfAttention
from moe.config import TransformerConfig
from moe.layer import MoELayer
from moe.parallel import ProcessGroups
from moe.shared_experts import MLP
from moe.tensor_parallel import check_tensor_parallel, shard_attention


class MoETransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the mlp is a MoELayer or dense, by moe_layer_freq.

    Args:
        config: see TransformerConfig.
        groups: what `ProcessGroups.build` returned; None on one process.
        layer_number: the block's number, from 1; it decides whether the block is MoE or dense.

    Raises:
        ValueError: see `check_tensor_parallel`.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups | None = None, layer_number: int = 1) -> None:
        super().__init__()
        check_tensor_parallel(config, groups)
        self.layer_number = layer_number
        self.input_layernorm = RMSNorm(config)
        self.self_attention = SelfAttention(config)
        shard_attention(self.self_attention, groups)
        self.pre_mlp_layernorm = RMSNorm(config)
        self.is_moe = config.is_moe_layer(layer_number - 1)
        dense_width = config.ffn_hidden_size or 4 * config.hidden_size
        self.mlp = MoELayer(config, groups, layer_number) if self.is_moe else MLP(config, dense_width)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H]; padding_mask [S, B] bool, True = padding, is for the router of a MoE block.

        Under tensor parallelism both are this rank's slice of the sequence, [S / TP, B, ...].
        """
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states))
        mlp_input = self.pre_mlp_layernorm(hidden_states)
        mlp_output = self.mlp(mlp_input, padding_mask) if self.is_moe else self.mlp(mlp_input)
        return hidden_states + mlp_output
