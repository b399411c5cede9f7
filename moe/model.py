"""MoEGPT: a decoder-only language model of MoE transformer blocks."""

from __future__ import annotations

import math
import warnings

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from moe.attention import RMSNorm
from moe.block import MoETransformerBlock
from moe.config import TransformerConfig
from moe.layer import MoELayer
from moe.parallel import ProcessGroups, local_box, local_tensor
from moe.tensor_parallel import (
    check_tensor_parallel,
    embed,
    sequence_slice,
    shard_vocabulary,
    vocab_parallel_cross_entropy,
    whole_logits,
)
from router.collectives import deepcopy_sharing_groups
from router.router import check_padding_mask

IGNORED_LABEL = -100


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
        self.config, self.groups = config, groups
        check_tensor_parallel(config, groups)
        if config.moe_router_type == "expert_choice":
            text = "With moe_router_type 'expert_choice' the experts of a token depend on later tokens."
            warnings.warn(text, stacklevel=2)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=config.params_dtype)
        self.layers = nn.ModuleList(
            MoETransformerBlock(config.of_block(number - 1), groups, number)
            for number in range(1, config.num_layers + 1)
        )
        self.final_layernorm = RMSNorm(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.params_dtype)
        shard_vocabulary(self, groups)
        self.reset_parameters()

    __deepcopy__ = deepcopy_sharing_groups

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw embedding and attention from a normal distribution, narrower for projections back into the residual.

        Values depend on torch's seed alone: every rank draws whole parameters and keeps its part.

        Source: GPT-2's factor 1 / sqrt(2 * layers), as in Megatron-Core's scaled_init_method_normal.
        """
        std = self.config.init_method_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
                whole = torch.empty(module.weight.shape, dtype=module.weight.dtype, device=module.weight.device)
                whole.normal_(std=residual_std if name.endswith("linear_proj") else std)
                local_tensor(module.weight).copy_(whole[local_box(module.weight)])
                if isinstance(module, nn.Linear) and module.bias is not None:
                    local_tensor(module.bias).zero_()

    def forward(self, tokens: Tensor, labels: Tensor | None = None, padding_mask: Tensor | None = None) -> Tensor:
        """Return the next-token loss, or without labels the logits.

        Args:
            tokens: [B, S] int64 token ids.
            labels: [B, S] int64, the token that follows each position, -100 where there is none; None for logits.
            padding_mask: [B, S] bool, True = padding, at the end of sequences: no loss, and invisible to routers.

        Returns:
            With labels [] fp32, the cross-entropy in nats: the mean over this rank's valid tokens (0 without any), or
            with calculate_per_token_loss the sum over them; else logits [B, S, V].

        Ranks of tp get the same batch and return the same; in between each holds its slice, [S / TP, B, H].

        Raises:
            ValueError: a mask of another shape; a sequence that TP does not divide.
        """
        tokens = rearrange(tokens, "b s -> s b")  # [B, S] -> [S, B]
        sequence_slice(tokens, self.groups)
        hidden_states = embed(tokens, self.embedding, self.groups)  # [S, B] -> [S, B, H]
        if padding_mask is not None:
            check_padding_mask(padding_mask, tokens.t().shape)
        padding = None if padding_mask is None else rearrange(padding_mask, "b s -> s b")
        padding_here = None if padding is None else sequence_slice(padding, self.groups)
        for layer in self.layers:
            hidden_states = layer(hidden_states, padding_here)  # [S, B, H]
        logits = self.output_layer(self.final_layernorm(hidden_states))  # [S, B, H] -> [S, B, V]
        if labels is None:
            return rearrange(whole_logits(logits, self.groups), "s b v -> b s v")
        targets = rearrange(labels, "b s -> s b")
        if padding is not None:
            targets = targets.masked_fill(padding, IGNORED_LABEL)
        loss = self._cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.config.calculate_per_token_loss:
            return loss
        return loss / (targets != IGNORED_LABEL).sum().clamp(min=1)

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies: logits [S * B, V / TP], targets [S * B] -> [] fp32 or fp64."""
        if self.groups is not None and self.groups.tp.size() > 1:
            return vocab_parallel_cross_entropy(logits, targets, self.groups, IGNORED_LABEL)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return F.cross_entropy(logits.to(dtype), targets, ignore_index=IGNORED_LABEL, reduction="sum")

    def moe_layers(self) -> dict[str, MoELayer]:
        """Return the MoE layers by their name in the model, first to last."""
        return {name: module for name, module in self.named_modules() if isinstance(module, MoELayer)}
