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

    Args:
        config: see TransformerConfig.

    Attributes:
        linear_qkv.weight: [(heads + 2 * groups) * D, H]: all query heads, then key heads, then value heads.
        linear_proj.weight: [H, heads * D].

    Source: GQA, arXiv:2305.13245, section 2.2.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads, self.head_size = config.num_attention_heads, config.head_size
        self.num_groups = config.num_query_groups or config.num_attention_heads
        self.rotary_base = config.rotary_base
        width, kv_width = self.num_heads * self.head_size, self.num_groups * self.head_size
        bias, dtype = config.add_bias_linear, config.params_dtype
        self.linear_qkv = nn.Linear(config.hidden_size, width + 2 * kv_width, bias=bias, dtype=dtype)
        self.linear_proj = nn.Linear(width, config.hidden_size, bias=bias, dtype=dtype)
        self.splits = (width, kv_width, kv_width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Let each position see itself and those before it: [S, B, H] -> [S, B, H]."""
        query, key, value = (
            rearrange(part, "s b (heads d) -> b heads s d", d=self.head_size)
            for part in self.linear_qkv(hidden_states).split(self.splits, dim=-1)
        )  # [B, heads, S, D], [B, groups, S, D] twice
        query, key = rotary_embedding(query, self.rotary_base), rotary_embedding(key, self.rotary_base)
        grouped = self.num_groups != self.num_heads
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.linear_proj(rearrange(context, "b heads s d -> s b (heads d)"))
