"""MLP, the dense feed-forward part, and SharedExpertMLP, the expert that every token visits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from moe.expert_function import expert_mlp
from moe.expert_loop import Slots
from moe.expert_weights import ExpertWeights
from moe.parallel import ProcessGroups
from router.gating import no_autocast


class Linear(nn.Module):
    """Weight and bias of one linear of a dense MLP.

    Attributes:
        weight: parameter.
        bias: parameter of the weight's shape without its last dimension, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, ...], config: MoEConfig) -> None:
        super().__init__()
        self.std = config.init_method_std
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        bias = nn.Parameter(torch.empty(shape[:-1], dtype=config.params_dtype)) if config.add_bias_linear else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution (torch's default generator); zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Show the shapes when the module is printed."""
        return f"weight={list(self.weight.shape)}, bias={self.bias is not None}, dtype={self.weight.dtype}"


class MLP(nn.Module):
    """linear_fc2(activation(linear_fc1(x))), computed as one expert that sees every token.

    Args:
        config: see MoEConfig; its activation and biases apply.
        ffn_hidden_size: F, the width in between.

    Attributes:
        linear_fc1.weight: [G, F, H] (gate then up). linear_fc1.bias: [G, F].
        linear_fc2.weight: [H, F]. linear_fc2.bias: [H].
    """

    def __init__(self, config: MoEConfig, ffn_hidden_size: int) -> None:
        super().__init__()
        self.config, self.activation = config, config.activation
        self.linear_fc1 = Linear((self.activation.num_inputs, ffn_hidden_size, config.hidden_size), config)
        self.linear_fc2 = Linear((config.hidden_size, ffn_hidden_size), config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the MLP of every token: [..., H] -> [..., H]."""
        return self._run(hidden_states, None)

    def _run(self, hidden_states: Tensor, weights: Tensor | None) -> Tensor:
        """hidden_states [..., H], weights [T] or None for 1 -> [..., H]."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [..., H] -> [T, H]
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        output = expert_mlp(
            tokens,
            weights,
            Slots(counts=(tokens.shape[0],)),
            self.activation,
            ExpertWeights(
                fc1.weight.unsqueeze(0),
                fc2.weight.unsqueeze(0),
                None if fc1.bias is None else fc1.bias.unsqueeze(0),
                None if fc2.bias is None else fc2.bias.unsqueeze(0),
            ),
        )
        return output.view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Show what is computed when the module is printed."""
        return f"activation={self.activation}"


class SharedExpertMLP(MLP):
    """The shared expert: an MLP on every token, with moe_shared_expert_gate times sigmoid(x @ gate_weight^T).

    Args:
        config: see MoEConfig; moe_shared_expert_intermediate_size is the width.
        groups: process groups; the shared expert is replicated, so they are not needed to compute.

    Attributes:
        gate_weight: [1, H] parameter, or None without the gate.

    Raises:
        ValueError: the config has no moe_shared_expert_intermediate_size.

    Source: DeepSeekMoE, arXiv:2401.06066, section 3.2; the gate is Qwen2-MoE's (arXiv:2407.10671, section 2.2.2).
    """

    gate_weight: nn.Parameter | None

    def __init__(self, config: MoEConfig, groups: ProcessGroups | None = None) -> None:
        if config.moe_shared_expert_intermediate_size is None:
            raise ValueError("moe_shared_expert_intermediate_size (None) must be set to build a shared expert.")
        super().__init__(config, config.moe_shared_expert_intermediate_size)
        gate = torch.empty(1, config.hidden_size, dtype=config.params_dtype) if config.moe_shared_expert_gate else None
        self.register_parameter("gate_weight", None if gate is None else nn.Parameter(gate))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the gate from a normal distribution (torch's default generator); the linears have their own."""
        if self.gate_weight is not None:
            nn.init.normal_(self.gate_weight, std=self.config.init_method_std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the shared expert's output of every token: [..., H] -> [..., H]."""
        if self.gate_weight is None:
            return self._run(hidden_states, None)
        dtype = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        with no_autocast(hidden_states.device):
            scores = hidden_states.to(dtype) @ self.gate_weight[0].to(dtype)  # [..., H] -> [...]
        return self._run(hidden_states, scores.sigmoid().flatten())
