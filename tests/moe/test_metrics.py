"""Metrics of routers against numbers worked out by hand."""

import pytest
import torch
from torch import nn

from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.metrics import COUNTS, LOSSES, MoEMetrics, collect_metrics
from moe.parallel import ProcessGroups
from tests import reference
from tests.tolerances import assert_close


def layer(num_experts: int = 4, **fields: object) -> MoELayer:
    return MoELayer(MoEConfig(hidden_size=12, num_moe_experts=num_experts, moe_ffn_hidden_size=7, **fields))


def test_load_imbalance_by_hand() -> None:
    counts = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0], [1, 2, 3, 6], [0, 0, 0, 0]])
    dropped = torch.tensor([[0, 1, 0, 1], [6, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    zeros = dict.fromkeys(
        ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"), torch.zeros(4, dtype=torch.float64)
    )
    metrics = MoEMetrics(("a", "b", "c", "d"), counts, dropped, counts * 0, **zeros)
    assert metrics.load_imbalance.tolist() == [1.0, 4.0, 2.0, 0.0]
    assert metrics.drop_rate.tolist() == [0.25, 0.75, 0.0, 0.0]


def test_counts_and_losses_and_that_counters_start_again() -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict(
        {"first": layer(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2), "second": nn.Sequential(layer())}
    )
    hidden_states, groups = torch.randn(5, 3, 12), ProcessGroups.build()
    expected = {}
    for name, module in {"first.router": model["first"], "second.0.router": model["second"][0]}.items():
        for _ in range(2):
            module(hidden_states).sum().backward()
        logits = hidden_states.flatten(0, 1).double() @ module.router.weight.double().T
        expected[name] = logits.detach()
    metrics = collect_metrics(model, groups)
    assert metrics.layer_names == tuple(expected)
    for index, logits in enumerate(expected.values()):
        assert metrics.tokens_per_expert[index].tolist() == (2 * reference.largest(logits, 2).sum(0)).tolist()
    first = expected["first.router"]
    aux_loss = torch.stack([reference.aux_loss(first, 2, 1.0), torch.zeros((), dtype=torch.float64)])
    z_loss = torch.stack([reference.z_loss(first, 1.0), torch.zeros((), dtype=torch.float64)])
    assert_close(metrics.aux_loss, aux_loss, torch.float32)
    assert_close(metrics.z_loss, z_loss, torch.float32)
    again = collect_metrics(model, groups)
    assert not again.tokens_per_expert.any()
    assert again.load_imbalance.tolist() == [0.0, 0.0]


def test_a_model_without_a_moe_layer_has_no_rows() -> None:
    metrics = collect_metrics(nn.Linear(2, 3), ProcessGroups.build())
    assert metrics.layer_names == ()
    for values in (
        metrics.tokens_per_expert,
        metrics.aux_loss,
        metrics.z_loss,
        metrics.load_imbalance,
        metrics.drop_rate,
    ):
        assert values.shape[0] == 0


def test_routers_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"this model has \[3, 4\]"):
        collect_metrics(nn.ModuleList([layer(4), layer(3)]), ProcessGroups.build())


def test_every_count_and_loss_arrives_and_starts_again() -> None:
    losses = {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
    }
    model, groups = layer(**losses, moe_z_loss_coeff=0.1, moe_expert_capacity_factor=0.5), ProcessGroups.build()
    model(torch.randn(5, 3, 12)).sum().backward()
    router = model.router
    expected = {name: getattr(router, name).clone() for name in (*COUNTS, *LOSSES)}
    assert expected["dropped_tokens_per_expert"].any()
    metrics = collect_metrics(model, groups)
    for name, value in expected.items():
        assert_close(getattr(metrics, name)[0], value.to(getattr(metrics, name).dtype), what=name)
    for name in COUNTS:
        assert not getattr(router, name).any()
    padded = layer(moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True)
    padded(torch.randn(5, 3, 12)).sum().backward()
    metrics = collect_metrics(padded, groups)
    kept = metrics.tokens_per_expert - metrics.dropped_tokens_per_expert + metrics.added_tokens_per_expert
    assert kept.tolist() == [[4] * 4]  # ceil(15 * 2 / 4 * 0.5)
