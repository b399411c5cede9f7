"""MoEGPT: a decoder-only language model of MoE transformer blocks."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from moe.attention import RMSNorm
from moe.block import MoETransformerBlock
from moe.config import TransformerConfig
from moe.layer import MoELayer
from moe.parallel import ProcessGroups


class MoEGPT(nn.Module):
    """Embedding, blocks, final norm and an output layer of its own weight.

    Args:
        config: see TransformerConfig.
        groups: what `ProcessGroups.build` returned; None on one process.

    Attributes:
        layers: num_layers MoETransformerBlocks.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=config.params_dtype)
        self.layers = nn.ModuleList(
            MoETransformerBlock(config, groups, number) for number in range(1, config.num_layers + 1)
        )
        self.final_layernorm = RMSNorm(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.params_dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw embedding and attention from a normal distribution, narrower for projections back into the residual.

        Source: GPT-2's factor 1 / sqrt(2 * layers), as in Megatron-Core's scaled_init_method_normal.
        """
        std = self.config.init_method_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("linear_proj") else std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean next-token loss, or without labels the logits.

        Args:
            tokens: [B, S] int64 token ids.
            labels: [B, S] int64, the token that follows each position; None for logits.

        Returns:
            With labels [] fp32, the mean cross-entropy over this rank's B * S tokens in nats; else logits [B, S, V].
        """
        hidden_states = self.embedding(rearrange(tokens, "b s -> s b"))  # [B, S] -> [S, B, H]
        for layer in self.layers:
            hidden_states = layer(hidden_states)  # [S, B, H]
        logits = self.output_layer(self.final_layernorm(hidden_states))  # [S, B, H] -> [S, B, V]
        if labels is None:
            return rearrange(logits, "s b v -> b s v")
        targets = rearrange(labels, "b s -> (s b)")
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return F.cross_entropy(logits.flatten(0, 1).to(dtype), targets)

    def moe_layers(self) -> dict[str, MoELayer]:
        """Return the MoE layers by their name in the model, first to last."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MoELayer)}
