"""ZeroComputationExperts: experts without a GEMM, which a router chooses beside the real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.config import MoEConfig
from router.gating import no_autocast


class ZeroComputationExperts(nn.Module):
    """Null experts give 0, identity experts the token x, constant experts a * x + b * v.

    They are the router's columns after the E real experts, in this order. A token that chooses one of them has fewer
    real experts: how many varies from token to token. They are computed where the token is and never travel.
    v is a learned vector of each constant expert; (a, b) = softmax(gate @ x).

    Args:
        config: moe_num_null_experts, moe_num_identity_experts, moe_num_constant_experts.

    Attributes:
        constant: [number of constant experts, H] parameter v, or None without such experts.
        gate: [number of constant experts, 2, H] parameter, or None.

    Source: MoE++, arXiv:2410.07348, section 3.1 (zero, copy and constant experts).
    """

    constant: nn.Parameter | None
    gate: nn.Parameter | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        num_constant, hidden_size = config.moe_num_constant_experts, config.hidden_size
        for name, shape in (("constant", (num_constant, hidden_size)), ("gate", (num_constant, 2, hidden_size))):
            parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype)) if num_constant else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw constants and gates from a normal distribution (torch's default generator)."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.config.init_method_std)

    def forward(self, hidden_states: Tensor, probs: Tensor) -> Tensor:
        """Return the weighted sum of these experts for every token.

        Args:
            hidden_states: [..., H], T tokens.
            probs: [T, Z] fp32 or fp64, the columns of these experts; zero where not routed.

        Returns:
            [..., H] in the dtype of hidden_states, computed in the dtype of probs.
        """
        _, identity, constant = probs.split(
            [
                self.config.moe_num_null_experts,
                self.config.moe_num_identity_experts,
                self.config.moe_num_constant_experts,
            ],
            dim=1,
        )
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1]).to(probs.dtype)  # [T, H]
        of_token, of_constant = identity.sum(1, keepdim=True), None  # [T, 1]
        if self.constant is not None and self.gate is not None:
            with no_autocast(tokens.device):
                logits = torch.einsum(
                    "th,cgh->tcg", tokens, self.gate.to(probs.dtype)
                )  # [T, H], [C, 2, H] -> [T, C, 2]
                mix = logits.softmax(-1) * constant.unsqueeze(-1)  # [T, C, 2]
                of_token = of_token + mix[..., 0].sum(1, keepdim=True)
                of_constant = mix[..., 1] @ self.constant.to(probs.dtype)  # [T, C], [C, H] -> [T, H]
        output = of_token * tokens if of_constant is None else of_token * tokens + of_constant
        return output.to(hidden_states.dtype).view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Show how many there are of each kind when the module is printed."""
        config = self.config
        return (
            f"null={config.moe_num_null_experts}, identity={config.moe_num_identity_experts},"
            f" constant={config.moe_num_constant_experts}"
        )
