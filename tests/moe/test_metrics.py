"""Metrics of routers against numbers worked out by hand."""

import gc
import json
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe.config import MoEConfig
from moe.layer import MoELayer
from moe.metrics import COUNTS, LOSSES, SLOTS, MoEMetrics, collect_metrics
from moe.parallel import ProcessGroups
from router.router import TopKRouter
from tests import reference
from tests.tolerances import assert_close


def layer(num_experts: int = 4, **fields: object) -> MoELayer:
    return MoELayer(MoEConfig(hidden_size=12, num_moe_experts=num_experts, moe_ffn_hidden_size=7, **fields))


def metrics_of(counts: list[list[int]], num_experts: tuple[int, ...], **fields: object) -> MoEMetrics:
    """Return metrics of these counts, with zeros for what is not given."""
    tokens = torch.tensor(counts)
    zeros = torch.zeros(len(counts), dtype=torch.float64)
    rest = dict.fromkeys(LOSSES, zeros) | dict.fromkeys(SLOTS, zeros.long()) | dict.fromkeys(COUNTS, tokens * 0)
    rest |= {"tokens_per_expert": tokens} | fields
    return MoEMetrics(tuple("abcdef"[: len(counts)]), num_experts, **rest)


def test_figures_by_hand() -> None:
    counts = [[2, 2, 2, 2], [8, 0, 0, 0], [1, 2, 3, 6], [0, 0, 0, 0], [3, 3, 0, 0], [5, 0, 0, 0]]
    dropped = torch.tensor([[0, 1, 0, 1], [6, 0, 0, 0], *[[0] * 4] * 4])
    slots = {"computed_slots": torch.tensor([8, 4, 16, 0, 6, 0]), "routed_slots": torch.tensor([6, 2, 12, 0, 6, 5])}
    metrics = metrics_of(counts, (4, 4, 4, 4, 2, 1), dropped_tokens_per_expert=dropped, **slots)
    assert metrics.load_imbalance.tolist() == [1.0, 4.0, 2.0, 0.0, 1.0, 1.0]
    assert metrics.drop_rate.tolist() == [0.25, 0.75, 0.0, 0.0, 0.0, 0.0]
    assert metrics.pad_share.tolist() == [0.25, 0.5, 0.25, 0.0, 0.0, 0.0]
    uneven = math.log(12) - (2 * math.log(2) + 3 * math.log(3) + 6 * math.log(6)) / 12
    assert metrics.load_entropy.tolist() == pytest.approx([math.log(4), 0.0, uneven, 0.0, math.log(2), 0.0])
    share = [1.0, 0.0, uneven / math.log(4), 0.0, 1.0, 1.0]  # one expert of one is balanced
    assert metrics.normalized_load_entropy.tolist() == pytest.approx(share)
    assert metrics.dead_experts == ((), (1, 2, 3), (), (), (), ())
    assert metrics.num_dead_experts.tolist() == [0, 3, 0, 0, 0, 0]


def test_dict_and_scalars_have_fixed_keys() -> None:
    metrics = metrics_of([[2, 4, 0], [7, 1, 0]], (3, 2), z_loss=torch.tensor([0.5, 1.5]), dispatch_bytes=12)
    keys = {"layer_names", "num_experts", "tokens_per_expert", "dropped_tokens_per_expert", "added_tokens_per_expert"}
    keys |= {"computed_slots", "routed_slots", "load_imbalance", "load_entropy", "normalized_load_entropy"}
    keys |= {"num_dead_experts", "dead_experts", "drop_rate", "pad_share"}
    losses = {"aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"}
    num_bytes = {"dispatch_bytes", "combine_bytes", "all_reduce_bytes", "communication_bytes"}
    asdict = metrics.to_dict()
    assert json.loads(json.dumps(asdict)) == asdict
    assert asdict.keys() == keys | losses | num_bytes
    assert asdict["tokens_per_expert"] == [[2, 4, 0], [7, 1]]
    assert (asdict["dead_experts"], asdict["num_dead_experts"]) == ([[2], []], [1, 0])
    assert (asdict["z_loss"], asdict["dispatch_bytes"]) == ([0.5, 1.5], 12)
    scalars = metrics.as_scalars()
    by_layer = {"load_imbalance", "load_entropy", "normalized_load_entropy", "num_dead_experts", "drop_rate"}
    by_layer |= {"pad_share"} | losses
    assert scalars.keys() == {f"{name}/{layer}" for name in by_layer for layer in "ab"} | num_bytes
    assert (scalars["load_imbalance/a"], scalars["num_dead_experts/a"], scalars["z_loss/b"]) == (2.0, 1.0, 1.5)
    assert {type(value) for value in scalars.values()} == {float}
    empty = collect_metrics(nn.Linear(2, 3), ProcessGroups.build())
    assert empty.to_dict().keys() == asdict.keys()
    assert empty.as_scalars().keys() == num_bytes


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


def test_layers_of_different_sizes_stand_in_one_table() -> None:
    torch.manual_seed(5)
    model, groups = nn.ModuleList([layer(4), layer(3)]), ProcessGroups.build()
    for module in model:
        module(torch.randn(5, 3, 12)).sum().backward()
    expected = [module.router.tokens_per_expert.tolist() for module in model]
    metrics = collect_metrics(model, groups)
    assert metrics.num_experts == (4, 3)
    assert metrics.tokens_per_expert.tolist() == [expected[0], [*expected[1], 0]]
    assert metrics.dead_experts == ((), ())
    loads = [max(load) * len(load) / sum(load) for load in expected]
    assert metrics.load_imbalance.tolist() == pytest.approx(loads)


def test_given_layers_must_name_the_model_s_routers() -> None:
    model, groups = nn.ModuleList([layer(4)]), ProcessGroups.build()
    metrics = collect_metrics(model, groups, {"elsewhere": 9, "0.router": 4})
    assert (metrics.layer_names, metrics.tokens_per_expert.shape) == (("elsewhere", "0.router"), (2, 9))
    with pytest.raises(ValueError, match=r"router '0.router' has 4 experts, but layers gives it 5; name every router"):
        collect_metrics(model, groups, {"0.router": 5})
    with pytest.raises(ValueError, match=r"router '0.router' has 4 experts, but layers has other; name every router"):
        collect_metrics(model, groups, {"other": 4})


def test_a_bare_router_has_load_and_no_slots() -> None:
    model = nn.ModuleDict({"gate": TopKRouter(MoEConfig(hidden_size=12, num_moe_experts=4, moe_ffn_hidden_size=7))})
    model["gate"](torch.randn(5, 3, 12))[0].sum().backward()
    metrics = collect_metrics(model, ProcessGroups.build())
    assert metrics.tokens_per_expert.sum() == 30
    assert (metrics.computed_slots.tolist(), metrics.routed_slots.tolist(), metrics.pad_share.tolist()) == (
        [0],
        [0],
        [0.0],
    )


PADDED = {"moe_router_padding_for_quantization": True}


def slots_of(module: nn.Module) -> tuple[int, int]:
    metrics = collect_metrics(module, ProcessGroups.build())
    return int(metrics.computed_slots[0]), int(metrics.routed_slots[0])


@pytest.mark.parametrize("how", ["plain", "recompute", "reentrant", "not reentrant", "both"])
@pytest.mark.parametrize("num_tokens", [16, 15])
def test_slots_count_once_per_token_and_step(how: str, num_tokens: int) -> None:
    torch.manual_seed(2)
    module = layer(**PADDED, moe_layer_recompute=how in ("recompute", "both"))
    for _ in range(3):
        hidden = torch.randn(num_tokens, 1, 12, requires_grad=True)
        if how in ("reentrant", "not reentrant", "both"):
            output = checkpoint(module, hidden, use_reentrant=how == "reentrant")
        else:
            output = module(hidden)
        output.sum().backward()
    computed, routed = slots_of(module)
    assert routed == 3 * num_tokens * 2
    assert computed == 3 * 4 * 16  # of 4 experts each has a token, and at most 16
    assert slots_of(module) == (0, 0)


def test_slots_do_not_count_in_eval_without_grad_and_without_backward() -> None:
    module, hidden = layer(**PADDED), torch.randn(16, 1, 12)
    with torch.no_grad():
        module(hidden)
    module(hidden)  # its graph dies without a backward
    module.eval()(hidden).sum().backward()
    assert slots_of(module) == (0, 0)
    module.train()(hidden).sum().backward()
    assert slots_of(module) == (64, 32)


def test_frozen_layers_count_at_once() -> None:
    module = layer(**PADDED).requires_grad_(False)
    module(torch.randn(16, 1, 12))
    assert slots_of(module) == (64, 32)


def test_capacity_padding_is_padding_and_rounding_is_not() -> None:
    hidden = torch.randn(16, 1, 12)
    for dispatcher in ("alltoall", "allgather"):  # the first sends empty slots, the second tokens of prob 0
        module = layer(
            moe_expert_capacity_factor=1.5,
            moe_pad_expert_input_to_capacity=True,
            moe_token_dispatcher_type=dispatcher,
        )
        module(hidden).sum().backward()
        kept = module.router.tokens_per_expert - module.router.dropped_tokens_per_expert
        assert slots_of(module) == (4 * 12, int(kept.sum()))  # 16 * 2 / 4 * 1.5
    module = layer(moe_token_rounding_policy="up", moe_token_rounding_multiple=4)
    module(hidden).sum().backward()
    added = int(module.router.added_tokens_per_expert.sum())
    assert added > 0
    assert slots_of(module) == (32 + added, 32 + added)


def test_zero_experts_have_load_and_no_slots() -> None:
    module = layer(moe_num_identity_experts=2, moe_num_null_experts=1)
    module(torch.randn(16, 1, 12)).sum().backward()
    real = int(module.router.tokens_per_expert[:4].sum())
    assert 0 < real < 32
    assert slots_of(module) == (real, real)


def test_two_models_interleaved_give_the_figures_of_separate_runs() -> None:
    def models() -> list[MoELayer]:
        torch.manual_seed(7)
        return [layer(8, **PADDED, moe_aux_loss_coeff=0.1), layer(8, moe_expert_capacity_factor=0.5)]

    def figures(model: MoELayer) -> dict[str, object]:
        return collect_metrics(model, ProcessGroups.build()).to_dict()

    inputs = [torch.randn(9 + step, 2, 12) for step in range(3)]
    separate = []
    for model in models():
        for hidden in inputs:
            model(hidden).sum().backward()
        separate.append(figures(model))
    pair = models()
    for hidden in inputs:
        outputs = [model(hidden) for model in pair]
        for output in outputs:
            output.sum().backward()
    assert [figures(model) for model in pair] == separate
    assert separate[0]["pad_share"][0] > 0
    assert separate[1]["drop_rate"][0] > 0


def test_forwards_without_backward_leave_no_objects() -> None:
    module, groups, hidden = layer(**PADDED, moe_aux_loss_coeff=0.1), ProcessGroups.build(), torch.randn(16, 1, 12)

    def num_objects() -> int:
        for _ in range(100):
            module(hidden)
        collect_metrics(module, groups)
        gc.collect()
        return len(gc.get_objects())

    num_objects()
    assert abs(num_objects() - num_objects()) < 20  # an object a forward would be 100


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
