"""The activation between the two expert GEMMs: one object for every backend, the experts and the dense MLPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

QUICK_GELU_ALPHA = 1.702

ActivationName = Literal["silu", "gelu", "quick_gelu", "squared_relu"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """phi(x), or for gated units phi(gate) * (up + offset), with inputs clamped if asked for.

    phi: "silu" x sigmoid(x); "gelu" x Phi(x) with the exact normal distribution; "quick_gelu" x sigmoid(1.702 x);
    "squared_relu" relu(x)^2. With a clamp c: gate to at most c, up to [-c, c].

    Attributes:
        name: phi.
        gated: whether the input holds gate and up.
        offset: added to up.
        clamp: c, or None.

    Raises:
        ValueError: an unknown name, clamp <= 0, or clamp or offset without a gated unit.

    Source: GLU Variants Improve Transformer, arXiv:2002.05202, section 2; the clamped form with alpha 1.702, offset 1
        and clamp 7 is gpt-oss's (arXiv:2508.10925, section 2.2).
    """

    name: ActivationName = "silu"
    gated: bool = True
    offset: float = 0.0
    clamp: float | None = None

    def __post_init__(self) -> None:
        """Check the combination."""
        if self.name not in ("silu", "gelu", "quick_gelu", "squared_relu"):
            raise ValueError(
                f"activation_func ({self.name!r}) must be one of 'silu', 'gelu', 'quick_gelu', 'squared_relu'."
            )
        if self.clamp is not None and not self.clamp > 0:
            raise ValueError(f"activation_func_clamp_value ({self.clamp}) must be positive, or None for no clamp.")
        if not self.gated and (self.offset or self.clamp is not None):
            raise ValueError(
                f"glu_linear_offset ({self.offset}) and activation_func_clamp_value ({self.clamp}) belong to gated"
                " units; set gated_linear_unit=True or leave them out."
            )

    @property
    def num_inputs(self) -> int:
        """G: 2 (gate, then up) for gated units, else 1."""
        return 2 if self.gated else 1

    def forward(self, fc1_output: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the activation of the first GEMM's output: [M, G, F] -> [M, F], in `out` or in new memory."""
        out = torch.empty_like(fc1_output[:, 0]) if out is None else out
        gate, up = self._inputs(fc1_output)
        return self._phi(gate, out) if up is None else self._phi(gate, out).mul_(up)

    def forward_backward(
        self,
        fc1_output: Tensor,
        grad: Tensor,
        weights: Tensor | None,
        grad_input: Tensor,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Recompute the activation and differentiate weights * activation in one go.

        Args:
            fc1_output: [M, G, F].
            grad: [M, F], gradient with respect to the weighted activation; overwritten.
            weights: [M] multiplied onto the activation, or None for 1.
            grad_input: [M, G, F], receives the gradient with respect to fc1_output.
            out: [M, F], receives the weighted activation; None: new memory does.

        Returns:
            The weighted activation [M, F]; the gradient with respect to weights [M], or None without weights.
        """
        out = torch.empty_like(fc1_output[:, 0]) if out is None else out
        gate, up = self._inputs(fc1_output)
        if up is None:
            self._phi(gate, out)
        else:
            phi = self._phi(gate, grad_input[:, 1])  # there until the gradient of up takes its place
            torch.mul(phi, up, out=out)
        grad_weights = None
        if weights is not None:
            grad_weights = torch.linalg.vecdot(grad, out)  # [M]
            weights = weights.unsqueeze(-1)  # [M, 1]
            grad.mul_(weights)
            out.mul_(weights)
        if up is not None:
            grad_input[:, 1].mul_(grad)
            grad.mul_(up)
        self._phi_backward(grad, gate, out=grad_input[:, 0])
        if self.clamp is not None:
            grad_input[:, 0].masked_fill_(fc1_output[:, 0] > self.clamp, 0)
            grad_input[:, 1].masked_fill_(fc1_output[:, 1].abs() > self.clamp, 0)
        return out, grad_weights

    def _inputs(self, fc1_output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what phi takes and what multiplies it, None without a gate: [M, G, F] -> [M, F] each."""
        if not self.gated:
            return fc1_output[:, 0], None
        gate, up = fc1_output.unbind(1)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return gate, up + self.offset if self.offset else up

    def _phi(self, x: Tensor, out: Tensor) -> Tensor:
        """Write phi(x) to out and return it; both [M, F]."""
        if self.name == "silu":
            return torch.ops.aten.silu.out(x, out=out)
        if self.name == "quick_gelu":
            return torch.mul(x, QUICK_GELU_ALPHA, out=out).sigmoid_().mul_(x)
        if self.name == "gelu":
            return torch.ops.aten.gelu.out(x, out=out)
        return torch.clamp(x, min=0, out=out).square_()

    def _phi_backward(self, grad: Tensor, x: Tensor, out: Tensor) -> None:
        """Write grad * phi'(x) to out; all [M, F]."""
        if self.name == "silu":
            torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
        elif self.name == "quick_gelu":
            # With y = alpha x, phi(x) = silu(y) / alpha and so phi'(x) = silu'(y).
            torch.ops.aten.silu_backward.grad_input(grad, x * QUICK_GELU_ALPHA, grad_input=out)
        elif self.name == "gelu":
            torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=out)
        else:
            torch.mul(grad, F.relu(x).mul_(2), out=out)
