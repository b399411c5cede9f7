"""The smallest use: one layer, one process, one backward. Run: python examples/moe_layer.py"""

import torch

from moe import MoEConfig, MoELayer

config = MoEConfig(
    hidden_size=64,
    num_moe_experts=8,
    moe_ffn_hidden_size=128,
    moe_router_topk=2,
    moe_router_fusion=True,
    moe_aux_loss_coeff=0.01,
)
torch.manual_seed(0)
layer = MoELayer(config)
hidden_states = torch.randn(16, 4, 64, requires_grad=True)  # [S, B, H]: sequence, batch, hidden

output = layer(hidden_states)  # [S, B, H]
output.square().mean().backward()

print(layer.describe())
print("output", list(output.shape), "tokens per expert", layer.router.tokens_per_expert.tolist())
