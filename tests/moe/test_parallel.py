"""Process groups, the gradient rule, clipping, and that replicas stay bitwise equal."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe import MoEConfig, MoELayer, ProcessGroups, clip_grad_norm, finalize_gradients
from moe.parallel import (
    all_ranks_succeeded,
    dense_parameters,
    expert_parameters,
    local_tensor,
    shard_expert_parameter,
    sum_over_world,
)
from tests.ranks import run_ranks
from tests.tolerances import assert_close

FACTORINGS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
GROUP_NAMES = ("tp", "cp", "dp", "etp", "ep", "edp", "tp_cp", "dp_cp", "tp_dp_cp", "tp_ep")
HIDDEN, FFN, NUM_EXPERTS = 12, 20, 8


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def groups_worker(ep: int, etp: int, tp: int, cp: int) -> dict[str, list[int]]:
    groups = ProcessGroups.build(ep, etp, tp, cp)
    ranks = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in GROUP_NAMES}
    for name, group in ((name, getattr(groups, name)) for name in GROUP_NAMES):
        assert group.rank() == ranks[name].index(dist.get_rank())
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        assert total == sum(ranks[name])
    assert groups.is_expert_sharded == (ep * etp > 1)
    world_size = dist.get_world_size()
    assert groups.mesh.mesh_dim_names == ("dp", "cp", "tp")
    assert groups.mesh.mesh.tolist() == torch.arange(world_size).view(-1, cp, tp).tolist()
    assert groups.expert_mesh.mesh_dim_names == ("edp", "ep", "etp")
    assert groups.expert_mesh.mesh.tolist() == torch.arange(world_size).view(-1, ep, etp).tolist()
    return ranks


WORLD_OF_4 = {  # ep 2, etp 1, tp 2, cp 1
    "tp": [[0, 1], [2, 3]],
    "cp": [[0], [1], [2], [3]],
    "dp": [[0, 2], [1, 3]],
    "etp": [[0], [1], [2], [3]],
    "ep": [[0, 1], [2, 3]],
    "edp": [[0, 2], [1, 3]],
    "tp_cp": [[0, 1], [2, 3]],
    "dp_cp": [[0, 2], [1, 3]],
    "tp_dp_cp": [[0, 1, 2, 3]],
    "tp_ep": [[0, 1], [2, 3]],
}
WORLD_OF_8 = {  # ep 4, etp 2, tp 2, cp 2
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "etp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "ep": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "edp": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "tp_cp": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "tp_dp_cp": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "tp_ep": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


@pytest.mark.parametrize(
    ("world_size", "sizes", "table"), [(4, (2, 1, 2, 1), WORLD_OF_4), (8, (4, 2, 2, 2), WORLD_OF_8)]
)
def test_rank_order(world_size: int, sizes: tuple[int, int, int, int], table: dict[str, list[list[int]]]) -> None:
    for rank, ranks in enumerate(run_ranks(groups_worker, world_size, *sizes)):
        assert ranks == {name: next(members for members in table[name] if rank in members) for name in GROUP_NAMES}


def test_one_process_is_alone_in_every_group() -> None:
    groups = ProcessGroups.build()
    for name in GROUP_NAMES:
        assert (getattr(groups, name).size(), getattr(groups, name).rank()) == (1, 0)
    assert groups.mesh is None
    assert groups.expert_mesh is None
    assert not groups.is_expert_sharded


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("expert_model_parallel_size", 0, r"expert_model_parallel_size \(0\) must be at least 1"),
        ("expert_tensor_parallel_size", -1, r"expert_tensor_parallel_size \(-1\) must be at least 1"),
        ("tensor_model_parallel_size", 0, r"tensor_model_parallel_size \(0\) must be at least 1"),
        ("context_parallel_size", 0, r"context_parallel_size \(0\) must be at least 1"),
        (
            "expert_model_parallel_size",
            2,
            r"number of ranks \(1\) must be divisible by expert_model_parallel_size \(2\)",
        ),
        ("context_parallel_size", 3, r"\(1\) must be divisible by .*context_parallel_size \(3\) = 3.*1 ranks: \[1\]"),
    ],
)
def test_one_process_refuses(name: str, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProcessGroups.build(**{name: size})


def refusals_worker() -> list[str]:
    told = []
    for sizes in ((3, 1, 1, 1), (2, 4, 1, 1), (1, 1, 2, 4)):
        with pytest.raises(ValueError) as caught:
            ProcessGroups.build(*sizes)
        told.append(str(caught.value))
    return told


def test_sizes_must_divide_the_number_of_ranks() -> None:
    for told in run_ranks(refusals_worker, 4):
        assert "expert_model_parallel_size (3) x expert_tensor_parallel_size (1) = 3" in told[0]
        assert "expert_model_parallel_size (2) x expert_tensor_parallel_size (4) = 8" in told[1]
        assert "tensor_model_parallel_size (2) x context_parallel_size (4) = 8" in told[2]
        assert all("The number of ranks (4)" in text and "fit 4 ranks: [1, 2, 4]" in text for text in told)


def make_layer(groups: ProcessGroups | None, dtype: torch.dtype = torch.float64, **fields: Any) -> MoELayer:
    torch.manual_seed(11)
    config = MoEConfig(
        hidden_size=HIDDEN,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=FFN,
        params_dtype=dtype,
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        add_bias_linear=True,
        init_method_std=0.3,
        **fields,
    )
    return MoELayer(config, groups)


def random_input(seed: int, num_tokens: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, 1, HIDDEN, generator=generator, dtype=torch.float64)


def backward(layer: nn.Module, seed: int, weight: float = 1.0) -> None:
    output = layer(random_input(seed).to(next(layer.parameters()).dtype))
    (output.square().sum() * weight).backward()


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad).clone() for name, p in layer.named_parameters() if p.grad is not None}


def initial_values_worker() -> list[dict[str, Tensor]]:
    values = []
    for ep, etp in FACTORINGS:
        layer = make_layer(ProcessGroups.build(ep, etp), torch.bfloat16)
        values.append({name: full(p.detach()) for name, p in layer.named_parameters()})
    return values


def test_initial_values_do_not_depend_on_the_factoring() -> None:
    expected = dict(make_layer(None, torch.bfloat16).named_parameters())
    weights = expected["experts.linear_fc1.weight"]
    assert len({weights[e].sum().item() for e in range(NUM_EXPERTS)}) == NUM_EXPERTS
    for by_factoring in run_ranks(initial_values_worker, 4):
        for values in by_factoring:
            assert values.keys() == expected.keys()
            for name, value in values.items():
                assert torch.equal(value, expected[name]), name


def sharding_worker() -> None:
    groups = ProcessGroups.build(2, 2)
    whole = torch.arange(4 * 6).view(4, 6)
    local = whole.chunk(2)[groups.ep.rank()].chunk(2, 1)[groups.etp.rank()]
    sharded = shard_expert_parameter(local.contiguous(), groups, 1)
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(local_tensor(sharded), local)
    assert sum_over_world(torch.tensor([dist.get_rank(), 1]), groups).tolist() == [6, 4]
    error = ValueError("odd") if dist.get_rank() == 2 else None
    assert all_ranks_succeeded(error) == ["", "", "ValueError: odd", ""]


def test_shards_know_their_whole_and_sums_span_the_world() -> None:
    run_ranks(sharding_worker, 4)
    value = torch.tensor([3])
    total = sum_over_world(value, ProcessGroups.build())
    assert total.tolist() == [3]
    assert total.data_ptr() != value.data_ptr()
    assert all_ranks_succeeded(None) == [""]
    assert all_ranks_succeeded(KeyError("x")) == ["KeyError: 'x'"]


def test_expert_and_dense_parameters_share_out_the_model() -> None:
    layer = make_layer(None, moe_shared_expert_intermediate_size=3)
    names = {id(p): name for name, p in layer.named_parameters()}
    experts = {names[id(p)] for p in expert_parameters(layer)}
    assert experts == {f"experts.linear_fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    assert {names[id(p)] for p in dense_parameters(layer)} == set(names.values()) - experts


def dense(*values: float, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


class HandMade(nn.Module):
    """Two dense parameters and two expert parameters whose gradients are set by hand."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.frozen = dense(1, 2, dtype=dtype), dense(3, dtype=dtype)
        self.frozen.requires_grad_(False)
        self.experts = nn.Module()
        self.experts.expert_parallel = True
        self.experts.weight, self.experts.unused = dense(4, 5, 6, dtype=dtype), dense(7, 8, dtype=dtype)


def rule_worker(tp: int, cp: int, ep: int, etp: int, bucket_elements: int, num_microbatches: int) -> dict[str, Any]:
    groups, rank, model = ProcessGroups.build(ep, etp, tp, cp), dist.get_rank(), HandMade()
    model.first.grad = torch.tensor([1.0, 10.0], dtype=torch.float64) * (rank + 1)
    model.experts.weight.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * 10**rank
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("moe.gradients.BUCKET_ELEMENTS", bucket_elements)
        finalize_gradients(model, groups, num_microbatches)
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}


@pytest.mark.parametrize("bucket_elements", [1, 4, 1 << 24])
def test_the_gradient_rule_by_hand(bucket_elements: int) -> None:
    # 4 ranks: tp 2, cp 1, dp 2; ep 2, edp 2: experts of ranks 0 and 2 are replicas, as are those of 1 and 3
    results = run_ranks(rule_worker, 4, 2, 1, 2, 1, bucket_elements, 1)
    for rank, result in enumerate(results):
        assert result["first"] == [10 / 2, 100 / 2]  # summed over 4 ranks, divided by dp x cp = 2
        replicas = 1 + 100 if rank % 2 == 0 else 10 + 1000
        assert result["experts.weight"] == [replicas / 2, 2 * replicas / 2, 3 * replicas / 2]
        assert result["experts.unused"] == [0, 0]
        assert result["frozen"] is None


def test_the_gradient_rule_divides_by_dp_times_cp_and_by_micro_batches() -> None:
    # 4 ranks: cp 2, dp 2; ep 1, etp 1, edp 4
    for result in run_ranks(rule_worker, 4, 1, 2, 1, 1, 1 << 24, 2):
        assert result["first"] == [10 / 8, 100 / 8]
        assert result["experts.weight"] == [1111 / 8, 2222 / 8, 3333 / 8]


def test_one_process_divides_by_micro_batches() -> None:
    model = HandMade()
    model.first.grad = torch.tensor([4.0, 8.0], dtype=torch.float64)
    finalize_gradients(model, ProcessGroups.build(), num_microbatches=4)
    assert model.first.grad.tolist() == [1, 2]
    for parameter in (model.experts.weight, model.experts.unused):
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() == 0
    assert model.frozen.grad is None


@pytest.mark.parametrize("num_microbatches", [0, -1])
def test_finalize_refuses(num_microbatches: int) -> None:
    with pytest.raises(ValueError, match=rf"num_microbatches \({num_microbatches}\) must be at least 1"):
        finalize_gradients(HandMade(), ProcessGroups.build(), num_microbatches)


def narrow_worker() -> tuple[list[float], list[float], torch.dtype]:
    model = HandMade(torch.bfloat16)
    # Each element is large on one rank, so that no order of summing adds the small ones first everywhere.
    values = [1024.0 if element % 4 == dist.get_rank() else 4.0 for element in range(16)]
    for module, name in ((model, "first"), (model.experts, "weight")):
        setattr(module, name, dense(*[0.0] * 16, dtype=torch.bfloat16))
        getattr(module, name).grad = torch.tensor(values, dtype=torch.bfloat16)
    finalize_gradients(model, ProcessGroups.build())
    assert model.first.grad is not None
    return model.first.grad.tolist(), model.experts.weight.grad.tolist(), model.first.grad.dtype


def test_bf16_gradients_are_summed_in_fp32() -> None:
    # (1024 + 4 + 4 + 4) / 4 = 259, rounded once to 260; in bf16 each 4 is lost
    for first, weight, dtype in run_ranks(narrow_worker, 4):
        assert first == [260] * 16
        assert weight == [260] * 16
        assert dtype == torch.bfloat16


def accumulation_worker() -> list[str]:
    found = []
    for ep, etp in FACTORINGS:
        groups, rank = ProcessGroups.build(ep, etp), dist.get_rank()
        accumulated, together = make_layer(groups), make_layer(groups)
        accumulated.router.bias.requires_grad_(False)
        for seed in (rank, 10 + rank):
            backward(accumulated, seed)
        finalize_gradients(accumulated, groups, num_microbatches=2)
        output = together(torch.cat([random_input(rank), random_input(10 + rank)]))
        (output.square().sum() / 2).backward()
        finalize_gradients(together, groups)
        if accumulated.router.bias.grad is not None:
            found.append("a frozen parameter has a gradient")
        expected = gradients(together)
        for name, gradient in gradients(accumulated).items():
            try:
                assert_close(gradient, expected[name], what=name)
            except AssertionError as error:
                found.append(f"ep {ep}, etp {etp}: {error}")
    return found


def test_two_micro_batches_equal_one_of_both() -> None:
    assert run_ranks(accumulation_worker, 4) == [[]] * 4


MAX_NORMS = (0.5, 1e9, float("inf"))


def clipping_worker(max_norm: float) -> list[tuple[float, float, float]]:
    """Return for each factoring the norm, that of the full gradients before, and that after clipping."""
    results = []
    for ep, etp in FACTORINGS:
        groups = ProcessGroups.build(ep, etp)
        layer = make_layer(groups)
        backward(layer, seed=dist.get_rank())
        finalize_gradients(layer, groups)
        before = torch.cat([g.flatten() for g in gradients(layer).values()]).norm()
        norm = clip_grad_norm(layer, max_norm, groups)
        after = torch.cat([g.flatten() for g in gradients(layer).values()]).norm()
        assert norm.dtype == torch.float64
        results.append((norm.item(), before.item(), after.item()))
    return results


def every_max_norm_worker() -> list[list[tuple[float, float, float]]]:
    return [clipping_worker(max_norm) for max_norm in MAX_NORMS]


def single_process_norm() -> float:
    layer = make_layer(None)
    for rank in range(4):
        backward(layer, seed=rank, weight=1 / 4)
    return float(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None]))


def test_the_norm_is_that_of_one_process_on_every_rank() -> None:
    results = run_ranks(every_max_norm_worker, 4)
    expected = single_process_norm()
    assert expected > 1
    for by_max_norm in results:
        for max_norm, by_factoring, first in zip(MAX_NORMS, by_max_norm, results[0], strict=True):
            assert [norm for norm, _, _ in by_factoring] == [norm for norm, _, _ in first]  # bit by bit
            for norm, before, after in by_factoring:
                assert norm == pytest.approx(before, rel=1e-12)
                assert norm == pytest.approx(expected, rel=1e-12)
                assert after == (before if max_norm > 1 else pytest.approx(max_norm, rel=1e-5))


def test_clipping_scales_every_gradient_alike() -> None:
    model = HandMade(torch.bfloat16)
    model.first.grad = torch.tensor([3.0, 0.0], dtype=torch.bfloat16)
    model.experts.weight.grad = torch.tensor([0.0, 4.0, 0.0], dtype=torch.bfloat16)
    assert clip_grad_norm(model, 1.25, ProcessGroups.build()).item() == 5
    assert model.first.grad.tolist() == [0.75, 0]
    assert model.experts.weight.grad.tolist() == [0, 1, 0]
    assert clip_grad_norm(nn.Module(), 1.0, ProcessGroups.build()).item() == 0


def param_groups(layer: nn.Module) -> list[dict[str, Any]]:
    kinds: Iterable[list[nn.Parameter]] = (dense_parameters(layer), expert_parameters(layer))
    return [{"params": parameters} for parameters in kinds]


def training_worker(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Train on other tokens on every rank; return this rank's own parameters for each factoring."""
    trained = []
    for ep, etp in FACTORINGS:
        groups, fields = ProcessGroups.build(ep, etp), {"moe_aux_loss_coeff": 0.1}
        layer = make_layer(groups, dtype, **fields)
        optimizer = torch.optim.AdamW(param_groups(layer), lr=0.01)
        for step in range(5):
            backward(layer, seed=10 * step + dist.get_rank())
            finalize_gradients(layer, groups)
            clip_grad_norm(layer, 1.0, groups)
            optimizer.step()
            optimizer.zero_grad()
        trained.append({name: local_tensor(p.detach()).clone() for name, p in layer.named_parameters()})
    return trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_stay_bitwise_equal(dtype: torch.dtype) -> None:
    results = run_ranks(training_worker, 4, dtype)
    start = dict(make_layer(None, dtype).named_parameters())
    for index, (ep, etp) in enumerate(FACTORINGS):
        for rank in range(4):
            trained = results[rank][index]
            for name, value in trained.items():
                twin = rank % (ep * etp) if name.startswith("experts") else 0
                assert torch.equal(value, results[twin][index][name]), (ep, etp, rank, name)
            assert not torch.equal(trained["router.weight"], start["router.weight"])
