"""Training over every factoring of the ranks equals training on one rank: losses, gradients, norms, weights.

The list of factorings is generated: TP, EP, ETP and FSDP on or off over 2 and 4 ranks. A spread runs always, the whole
list with `make test-slow`.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe import (
    MoEGPT,
    ProcessGroups,
    TransformerConfig,
    apply_fsdp,
    clip_grad_norm,
    finalize_gradients,
    update_expert_bias,
)
from moe.parallel import split_by_mesh
from tests.ranks import run_ranks
from tests.tolerances import assert_close

VOCAB, SEQUENCE, BATCH, NUM_STEPS = 12, 8, 8, 3
CONFIG = TransformerConfig(
    hidden_size=20,
    num_moe_experts=4,
    moe_ffn_hidden_size=12,
    num_layers=3,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=2,
    ffn_hidden_size=10,
    vocab_size=VOCAB,
    params_dtype=torch.float64,
    moe_router_dtype="fp64",
    moe_layer_freq=(1, 0, 1),
    moe_shared_expert_intermediate_size=6,
    moe_shared_expert_gate=True,
    moe_router_fusion=True,
    moe_router_padding_for_quantization=True,
    add_bias_linear=True,
    sequence_parallel=True,
    init_method_std=0.4,
)
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sequence loss, z-loss": {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.1,
        **BIASED,
    },
    "per token": {"calculate_per_token_loss": True, "moe_z_loss_coeff": 0.1},
    "aux loss": {"moe_aux_loss_coeff": 0.3},
}


@dataclass(frozen=True)
class Factoring:
    """How ranks are split."""

    world: int
    tp: int
    ep: int
    etp: int
    fsdp: bool

    def __str__(self) -> str:
        return f"{self.world} ranks, tp{self.tp} ep{self.ep} etp{self.etp}{' fsdp' if self.fsdp else ''}"

    @property
    def dp(self) -> int:
        return self.world // self.tp


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


FACTORINGS = [
    Factoring(world, tp, ep, etp, fsdp)
    for world in (2, 4)
    for tp, ep, etp, fsdp in itertools.product(divisors(world), divisors(world), divisors(world), (False, True))
    if world % (ep * etp) == 0
]
SPREAD = [  # each size of each kind, with and without FSDP
    Factoring(2, 2, 1, 2, False),
    Factoring(2, 1, 2, 1, True),
    Factoring(4, 2, 2, 1, True),
    Factoring(4, 1, 1, 1, True),
    Factoring(4, 4, 4, 1, False),
    Factoring(4, 2, 1, 2, True),
    Factoring(4, 1, 2, 2, False),
]


def global_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels [BATCH, SEQUENCE] and a mask with sequences of different lengths, one of them empty."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, labels = (torch.randint(VOCAB, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    lengths = torch.tensor([8, 3, 0, 8, 1, 5, 7, 2]).roll(step)
    return tokens, labels, torch.arange(SEQUENCE) >= lengths.unsqueeze(1)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def train(
    config: TransformerConfig,
    groups: ProcessGroups | None,
    num_microbatches: int,
    *,
    fsdp: bool = False,
    adamw: dict[str, bool] | None = None,
) -> dict[str, Tensor]:
    """Train NUM_STEPS steps on this rank's share of the global batches; return every figure, whole."""
    torch.manual_seed(5)
    model = MoEGPT(config, groups)
    groups = groups or ProcessGroups.build()
    if fsdp:
        apply_fsdp(model, groups)
    param_groups = [{"params": parameters} for parameters in split_by_mesh(model.parameters())]
    optimizer = torch.optim.AdamW(param_groups, lr=0.03, weight_decay=0.1, **(adamw or {}))
    found: dict[str, Tensor] = {}
    rank, num_ranks = groups.dp.rank(), groups.dp.size()
    for step in range(NUM_STEPS):
        model.zero_grad(set_to_none=True)
        micro_batches = [
            [part.chunk(num_microbatches * num_ranks)[micro * num_ranks + rank] for part in global_batch(step)]
            for micro in range(num_microbatches)
        ]
        per_token, loss_sum, num_tokens = config.calculate_per_token_loss, torch.zeros((), dtype=torch.float64), 0
        for tokens, labels, padding in micro_batches:
            loss = model(tokens, labels, padding if per_token else None)
            loss.backward()
            loss_sum += loss.detach()
            num_tokens += int((~padding).sum())
        finalize_gradients(model, groups, num_microbatches, num_tokens=num_tokens if per_token else None)
        found |= {f"step {step}: gradient of {name}": whole(p.grad) for name, p in model.named_parameters()}
        found[f"step {step}: norm"] = clip_grad_norm(model, 0.5, groups)
        shared = torch.stack([loss_sum, torch.tensor(float(num_tokens), dtype=torch.float64)])
        if num_ranks > 1:
            dist.all_reduce(shared, group=groups.dp)
        found[f"step {step}: loss"] = shared[0] / (shared[1] if per_token else num_microbatches * num_ranks)
        optimizer.step()
        update_expert_bias(model, groups)
    found |= {f"weight {name}": whole(p) for name, p in model.named_parameters()}
    found |= {f"buffer {name}": whole(b) for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return found


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, what=f"{where}: {name}")


def factoring_worker(
    factoring: Factoring, config: TransformerConfig, adamw: dict[str, bool], expected: dict[int, dict[str, Tensor]]
) -> int:
    """Train with each number of micro-batches and compare with one rank; return how many figures were compared."""
    groups = ProcessGroups.build(factoring.ep, factoring.etp, factoring.tp)
    count = 0
    for num_microbatches, figures in expected.items():
        found = train(config, groups, num_microbatches, fsdp=factoring.fsdp, adamw=adamw)
        compare(found, figures, f"{factoring}, {num_microbatches} micro-batches")
        count += len(found)
    return count


@cache
def one_rank(objective: str, cut: int) -> dict[str, Tensor]:
    """Return the figures of one process that cuts the global batch into so many micro-batches."""
    return train(replace(CONFIG, **OBJECTIVES[objective]), None, cut)


def check(factoring: Factoring, objective: str, adamw: dict[str, bool]) -> None:
    # aux_loss depends on how the batch is cut: one rank cuts it likewise; else it takes the whole batch at once.
    expected = {n: one_rank(objective, n * factoring.dp if objective == "aux loss" else 1) for n in (1, 2)}
    config = replace(CONFIG, **OBJECTIVES[objective])
    counts = run_ranks(factoring_worker, factoring.world, factoring, config, adamw, expected)
    assert min(counts) == sum(map(len, expected.values())) > 200


ALWAYS = [(factoring, "sequence loss, z-loss") for factoring in SPREAD]
ALWAYS += [(factoring, "per token") for factoring in SPREAD[1:5]]
ALWAYS += [(factoring, "aux loss") for factoring in (SPREAD[0], SPREAD[2], SPREAD[5])]
OTHERS = [case for case in itertools.product(FACTORINGS, OBJECTIVES) if case not in ALWAYS]


@pytest.mark.parametrize(("factoring", "objective"), ALWAYS, ids=str)
def test_training_equals_one_rank(factoring: Factoring, objective: str) -> None:
    check(factoring, objective, {"fused": True} if objective == "per token" else {"foreach": True})


@pytest.mark.slow
@pytest.mark.parametrize(("factoring", "objective"), OTHERS, ids=str)
def test_training_equals_one_rank_everywhere(factoring: Factoring, objective: str) -> None:
    check(factoring, objective, {"foreach": True})
