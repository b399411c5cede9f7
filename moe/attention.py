"""Causal self-attention: grouped-query heads, rotary embedding, torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from moe.config import TransformerConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 (fp64 for fp64).

    Args:
        config: hidden_size, layernorm_epsilon and params_dtype apply.

    Attributes:
        weight: [H] parameter.

    Source: Root Mean Square Layer Normalization, arXiv:1910.07467, section 3, equation 4.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.epsilon = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the same dtype."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.epsilon)

    def extra_repr(self) -> str:
        """Show the width when the module is printed."""
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


def rotary_embedding(states: Tensor, base: float) -> Tensor:
    """Rotate each pair (x_i, x_{i + D/2}) of position s by the angle s * base^(-2i / D).

    Args:
        states: [B, heads, S, D], D even.
        base: theta.

    Returns:
        The same shape and dtype; angles are computed in fp32 (fp64 for fp64).

    Source: RoFormer, arXiv:2104.09864, section 3.4.2, equation 34, in the half-split order that Megatron-Core uses.
    """
    length, width = states.shape[-2:]
    dtype = torch.float64 if states.dtype == torch.float64 else torch.float32
    frequencies = base ** (-torch.arange(0, width, 2, device=states.device, dtype=dtype) / width)  # [D / 2]
    angles = torch.outer(torch.arange(length, device=states.device, dtype=dtype), frequencies)  # [S, D / 2]
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, dim=-1)  # [B, heads, S, D / 2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class SelfAttention(nn.Module):
    """Causal self-attention with num_query_groups key/value heads.

    Under tensor parallelism (see `moe.tensor_parallel`) a rank computes its part of the groups over the whole sequence.

    Args:
        config: see TransformerConfig.

    Attributes:
        linear_qkv.weight: [groups * (heads / groups + 2) * D, H]: of each group its query heads, its key head, its
            value head, as in Megatron-Core.
        linear_proj.weight: [H, heads * D].

    Source: GQA, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_size, self.rotary_base = config.head_size, config.rotary_base
        num_heads = config.num_attention_heads
        self.num_groups = config.num_query_groups or num_heads
        self.heads_per_group = num_heads // self.num_groups
        width, bias, dtype = num_heads * self.head_size, config.add_bias_linear, config.params_dtype
        qkv_width = width + 2 * self.num_groups * self.head_size
        self.linear_qkv = nn.Linear(config.hidden_size, qkv_width, bias=bias, dtype=dtype)
        self.linear_proj = nn.Linear(width, config.hidden_size, bias=bias, dtype=dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Let each position see itself and those before it: [S, B, H] -> [S, B, H]; slices of S under TP."""
        parts = rearrange(
            self.linear_qkv(hidden_states),
            "s b (groups n d) -> b groups n s d",
            n=self.heads_per_group + 2,
            d=self.head_size,
        )  # [B, groups, heads / groups + 2, S, D]
        query, key, value = parts.split((self.heads_per_group, 1, 1), dim=2)
        query, key, value = (part.flatten(1, 2) for part in (query, key, value))  # [B, heads or groups, S, D]
        query, key = rotary_embedding(query, self.rotary_base), rotary_embedding(key, self.rotary_base)
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads_per_group > 1
        )  # [B, heads, S, D]
        return self.linear_proj(rearrange(context, "b heads s d -> s b (heads d)"))
