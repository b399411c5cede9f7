"""What a training loop calls once per step: every router is found, once, and ranks agree."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel import ProcessGroups
from router import RouterConfig, TopKRouter, reset_global_aux_loss_tracker, set_loss_scale, update_expert_bias
from tests.ranks import run_ranks
from tests.tolerances import assert_close

BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
QUANTILES = {"moe_router_load_balancing_type": "quantile_balancing"}


def _router(
    num_experts: int = 5, groups: ProcessGroups | None = None, kind: type[TopKRouter] = TopKRouter, **fields: object
) -> TopKRouter:
    config = RouterConfig(hidden_size=6, num_moe_experts=num_experts, params_dtype=torch.float64, **fields)
    torch.manual_seed(num_experts)
    router = kind(config, groups)
    nn.init.normal_(router.weight)
    return router


def _hidden(num_tokens: int, seed: int) -> Tensor:
    return torch.randn(num_tokens, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _train(router: TopKRouter, hidden: Tensor) -> Tensor:
    probs, routing_map = router(hidden)
    probs.sum().backward()
    return routing_map.sum(0)


class OwnRouter(TopKRouter):
    """A user's subclass."""


class Outer(nn.Module):
    """Holds a module as DistributedDataParallel and torch.compile do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Wrapper(nn.Module):
    """Holds routers in every kind of container, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = _router(3, **BIASED)
        self.layers = nn.ModuleList([nn.Sequential(_router(4, **BIASED)), nn.ModuleDict({"again": self.shared})])
        self.plain = _router(5)
        self.wrapped = Outer(Outer(_router(7, kind=OwnRouter, **BIASED)))
        self.head = nn.Linear(2, 2)


def test_every_router_is_updated_once_wherever_it_is() -> None:
    model = Wrapper()
    routers = [model.shared, model.layers[0][0], model.wrapped.module.module]
    counts = [_train(router, _hidden(11, seed=1)) for router in routers]
    _train(model.plain, _hidden(11, seed=1))
    assert update_expert_bias(model, ProcessGroups.build()) == 3
    for router, count in zip(routers, counts, strict=True):
        expected = torch.sign(count.double().mean() - count) * 1e-3
        assert_close(router.expert_bias, expected, torch.float32)
        assert not router.local_tokens_per_expert.any()
        assert torch.equal(router.tokens_per_expert, count)  # the metrics have counts of their own
    biases = [router.expert_bias.clone() for router in routers]
    assert update_expert_bias(model, ProcessGroups.build()) == 3  # no tokens since: nothing moves
    assert all(map(torch.equal, biases, [router.expert_bias for router in routers]))
    assert update_expert_bias(nn.Linear(2, 2), ProcessGroups.build()) == 0


@pytest.mark.parametrize("ema", [0.0, 0.25])
def test_quantiles_of_micro_batches_are_averaged_mixed_and_centred(ema: float) -> None:
    router = _router(**QUANTILES, moe_router_quantile_balancing_ema=ema)
    router.qb_beta.copy_(torch.tensor([0.4, -0.4, 0.2, -0.2, 0.0]))
    old, quantiles = router.qb_beta.clone(), []
    for seed in (1, 2, 3):
        before = router.qb_beta_sum.clone()
        _train(router, _hidden(10, seed))
        quantiles.append(router.qb_beta_sum - before)
    assert update_expert_bias(nn.ModuleList([router]), ProcessGroups.build()) == 1
    mixed = ema * old + (1 - ema) * torch.stack(quantiles).mean(0)
    assert_close(router.qb_beta, mixed - mixed.mean())
    assert not router.qb_beta_sum.any()
    assert router.qb_beta_count == 0
    settled = router.qb_beta.clone()
    update_expert_bias(router, ProcessGroups.build())
    assert torch.equal(router.qb_beta, settled)


TOKENS = {1: [20], 2: [20, 0], 4: [7, 0, 12, 1]}


def _steps(fields: dict[str, object], tp: int) -> dict[str, Tensor]:
    groups = ProcessGroups.build(tensor_model_parallel_size=tp)
    model = nn.ModuleDict({"small": _router(3, groups, **fields), "large": _router(5, groups, **fields)})
    for step in range(3):
        part = _hidden(20, seed=step).split(TOKENS[dist.get_world_size()])[dist.get_rank()]
        for router in model.values():
            _train(router, part)
        update_expert_bias(model, groups)
    return {name: value for name, value in model.state_dict().items() if name.endswith(("expert_bias", "qb_beta"))}


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_bias_is_that_of_one_process_over_all_tokens(world_size: int, tp: int) -> None:
    (expected,) = run_ranks(_steps, 1, BIASED, 1)
    assert expected["large.expert_bias"].abs().max() > 1e-3
    for result in run_ranks(_steps, world_size, BIASED, tp):
        assert result.keys() == expected.keys() == {"small.expert_bias", "large.expert_bias"}
        assert all(torch.equal(result[name], bias) for name, bias in expected.items())


@pytest.mark.parametrize("world_size", [2, 4])
def test_quantiles_of_a_sliced_micro_batch_are_those_of_the_whole(world_size: int) -> None:
    (expected,) = run_ranks(_steps, 1, QUANTILES, 1)
    assert expected["large.qb_beta"].abs().max() > 1e-2
    for result in run_ranks(_steps, world_size, QUANTILES, world_size):
        for name, beta in expected.items():
            assert_close(result[name], beta, what=name)


def _quantiles_of_uneven_micro_batches() -> tuple[Tensor, Tensor, Tensor]:
    """Rank r runs r micro-batches; what it recorded, how often, and the bias that followed."""
    groups = ProcessGroups.build()
    router = _router(groups=groups, **QUANTILES, moe_router_quantile_balancing_ema=0.25)
    router.qb_beta.copy_(torch.linspace(0.4, -0.4, 5))
    for micro_batch in range(dist.get_rank()):
        _train(router, _hidden(10, seed=10 * dist.get_rank() + micro_batch))
    recorded, count = router.qb_beta_sum.clone(), router.qb_beta_count.clone()
    update_expert_bias(router, groups)
    return recorded, count, router.qb_beta


@pytest.mark.parametrize("world_size", [2, 4])
def test_quantiles_of_all_ranks_weigh_alike(world_size: int) -> None:
    sums, counts, betas = zip(*run_ranks(_quantiles_of_uneven_micro_batches, world_size), strict=True)
    assert [int(count) for count in counts] == list(range(world_size))
    mixed = 0.25 * torch.linspace(0.4, -0.4, 5) + 0.75 * sum(sums) / sum(counts)
    for beta in betas:
        assert_close(beta, mixed - mixed.mean())
        assert torch.equal(beta, betas[0])


def _sizes_of_reductions(experts_of_biased: list[int], experts_of_quantiles: list[int]) -> list[int]:
    groups = ProcessGroups.build()
    biased = [_router(size, groups, **BIASED) for size in experts_of_biased]
    by_quantile = [_router(size, groups, **QUANTILES) for size in experts_of_quantiles]
    sizes, all_reduce = [], dist.all_reduce

    def counted(values: Tensor, **options: object) -> None:
        sizes.append(values.numel())
        all_reduce(values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        assert update_expert_bias(nn.ModuleList([*biased, *by_quantile]), groups) == len(biased) + len(by_quantile)
    return sizes


def test_all_routers_share_one_all_reduce_of_a_kind() -> None:
    assert run_ranks(_sizes_of_reductions, 2, [4, 3, 5], [6, 3]) == [[12, 11]] * 2
    assert run_ranks(_sizes_of_reductions, 2, [4], []) == [[4]] * 2
    assert run_ranks(_sizes_of_reductions, 2, [], []) == [[]] * 2


def test_loss_scale_reaches_every_router() -> None:
    model = Wrapper()
    for scale in (512.0, torch.tensor(0.25), torch.tensor(3.0, dtype=torch.float64)):
        set_loss_scale(model, scale)
        routers = (model.shared, model.layers[0][0], model.plain, model.wrapped.module.module)
        assert [router.loss_scale.item() for router in routers] == [float(scale)] * 4
        assert model.plain.loss_scale.dtype == torch.float32


def test_the_tracker_of_the_global_loss_is_emptied() -> None:
    fields = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    model = nn.ModuleList([_router(**fields), _router()])
    _train(model[0], _hidden(7, seed=1))
    assert model[0].global_tokens[-1] == 7
    reset_global_aux_loss_tracker(model)
    assert not model[0].global_tokens.any()
