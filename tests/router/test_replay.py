"""RoutingRecords and recompute: the same decision again, weights with their gradient, files, and what is refused."""

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe import MoEConfig, MoEGPT, MoELayer, TransformerConfig
from router import RouterConfig, RoutingRecords, TopKRouter, recompute
from tests import reference
from tests.tolerances import assert_close

HIDDEN_SIZE, NUM_EXPERTS, TOPK = 6, 5, 2
EXACT = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
MODES = [
    {},
    {"moe_router_fusion": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_load_balancing_type": "sinkhorn"},
    {"moe_router_load_balancing_type": "quantile_balancing"},
]


def _router(seed: int = 0, **fields: object) -> TopKRouter:
    torch.manual_seed(seed)
    return TopKRouter(RouterConfig(hidden_size=HIDDEN_SIZE, num_moe_experts=NUM_EXPERTS, init_method_std=1.0, **fields))


def _hidden(num_tokens: int = 17, seed: int = 1) -> Tensor:
    return torch.randn(num_tokens, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TwoLayers(nn.Module):
    """Two MoE layers with a dense one between them."""

    def __init__(self, *, with_dense: bool = True, **fields: object) -> None:
        super().__init__()
        sizes = {"hidden_size": HIDDEN_SIZE, "num_moe_experts": NUM_EXPERTS, "moe_ffn_hidden_size": 7}
        config = MoEConfig(**sizes, init_method_std=1.0, **EXACT, **fields)
        self.first = MoELayer(config)
        self.dense = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, dtype=torch.float64) if with_dense else nn.Identity()
        self.second = MoELayer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.second(self.dense(self.first(hidden).tanh()))

    def routers(self) -> list[TopKRouter]:
        return [self.first.router, self.second.router]


def _model(seed: int = 0, **fields: object) -> TwoLayers:
    torch.manual_seed(seed)
    return TwoLayers(**fields)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ids_are_forced_and_weights_keep_their_gradient(mode: dict[str, object]) -> None:
    recorded, replayed, hidden = _router(**EXACT, **mode), _router(1, **EXACT, **mode), _hidden().requires_grad_()
    records = RoutingRecords()
    with records.record(recorded):
        _, routing_map = recorded(hidden)
    own = replayed(hidden)[1]
    with records.replay(replayed):
        probs, forced = replayed(hidden)
    assert torch.equal(forced, routing_map)
    assert not torch.equal(forced, own)
    rule = replayed.rule
    logits = hidden @ replayed.weight.t()
    expected = reference.weights_on_map(
        logits, routing_map, TOPK, rule.score_function, rule.use_pre_softmax, rule.scaling_factor
    )
    upstream = torch.linspace(-1, 1, NUM_EXPERTS, dtype=torch.float64)
    leaves = [hidden, replayed.weight]
    assert_close(probs, expected)
    for actual, wanted in zip(
        torch.autograd.grad((probs * upstream).sum(), leaves),
        torch.autograd.grad((expected * upstream).sum(), leaves),
        strict=True,
    ):
        assert_close(actual, wanted)
    assert replayed.recorder is None


def test_recompute_inside_a_replay_takes_the_replayed_ids() -> None:
    router, hidden = _router(**EXACT), _hidden(4).requires_grad_()
    ids = torch.tensor([[4, 0], [0, 1], [1, 2], [3, 2]])
    assert not torch.equal(router(hidden)[1], torch.zeros(4, NUM_EXPERTS).scatter(1, ids, 1.0).bool())
    with RoutingRecords.from_dense(ids.unsqueeze(1), [""]).replay(router):
        probs, routing_map = recompute(router, hidden)
    assert torch.equal(routing_map, torch.zeros(4, NUM_EXPERTS).scatter(1, ids, 1.0).bool())
    probs.sum().backward()
    assert torch.equal(router.tokens_per_expert, routing_map.sum(0))


def test_recording_changes_nothing_and_replaying_itself_is_bitwise() -> None:
    model, hidden = _model(), _hidden(12).view(4, 3, HIDDEN_SIZE)
    expected = model(hidden)
    records = RoutingRecords()
    with records.record(model):
        assert torch.equal(model(hidden), expected)
    with records.replay(model):
        assert torch.equal(model(hidden), expected)
    assert records.layer_names == ("first.router", "second.router")
    assert records.get("first.router").dtype == torch.int32
    assert not records.get("first.router").requires_grad


def test_names_do_not_shift_with_dense_layers() -> None:
    records, hidden = RoutingRecords(), _hidden(12)
    with records.record(_model()):
        _model()(hidden)
    other = _model(with_dense=False)
    assert len(records) == 0  # another model than the one that ran
    with records.record(other):
        other(hidden)
    with records.replay(_model()) as again:
        assert again is records


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_micro_batches_are_kept_apart_and_backward_may_come_in_any_order(num_micro_batches: int) -> None:
    model, records, losses = _model(moe_aux_loss_coeff=0.1), RoutingRecords(), []
    parts = [_hidden(5 + number, seed=number) for number in range(num_micro_batches)]
    expected = [model(part).square().mean() for part in parts]
    sum(expected).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for number, part in enumerate(parts):
        with records.record(model, number):
            model(part)
    model.zero_grad()
    for number in reversed(range(num_micro_batches)):
        with records.replay(model, number):
            losses.append(model(parts[number]).square().mean())
    sum(losses).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient)
    assert records.micro_batches == tuple(range(num_micro_batches))


def _flip_all(model: TwoLayers) -> None:
    """Change every router so much that each of its choices would fall the other way."""
    with torch.no_grad():
        for router in model.routers():
            router.weight.neg_()


LIMITS = [
    {},
    {"moe_expert_capacity_factor": 0.5},
    {"moe_token_rounding_policy": "nearest", "moe_token_rounding_multiple": 4},
]


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("nested", [None, "record", "replay"])
def test_recompute_keeps_decisions_whatever_the_router_says_then(
    nested: str | None, use_reentrant: bool, limit: dict[str, object]
) -> None:
    model, hidden = _model(moe_aux_loss_coeff=0.1, **limit), _hidden(12).requires_grad_()
    records, outer = RoutingRecords(), RoutingRecords()
    with records.record(model):
        model(hidden)
    seen: list[tuple[Tensor, Tensor]] = []
    for router in model.routers():
        router.register_forward_hook(lambda module, args, result: seen.append(result))
    if nested == "replay":
        outer = records
    if nested is None:
        output = recompute(model, hidden, use_reentrant=use_reentrant)
    else:
        with getattr(outer, nested)(model):
            output = recompute(model, hidden, use_reentrant=use_reentrant)
    _flip_all(model)
    output.sum().backward()
    assert len(seen) == 4
    for (_, first), (probs, again) in zip(seen[:2], seen[2:], strict=True):
        assert torch.equal(first, again)
        assert torch.equal(probs != 0, again)
    for router in model.routers():
        assert router.tokens_per_expert.sum() == 12 * TOPK
        assert router.recorder is None
    if nested == "record":
        assert torch.equal(outer.get("second.router"), records.get("second.router"))


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("block", ["record", "replay", "replay of free rows"])
def test_blocks_keep_decisions_under_plain_checkpointing(
    block: str, use_reentrant: bool, limit: dict[str, object]
) -> None:
    router, records, seen = _router(**EXACT, **limit), RoutingRecords(), []
    if block != "record":
        ids = torch.tensor([[0, 1], [2, 4], [3, 1]]).repeat(4, 1)
        ids[5:] = ids[5:] if block == "replay" else -1
        records.set("", ids)
    with getattr(records, block.split()[0])(router):
        hidden = _hidden(12).requires_grad_()

        def run(hidden: Tensor) -> Tensor:
            seen.append(router(hidden))
            return seen[-1][0].exp().exp()

        output = checkpoint(run, hidden, use_reentrant=use_reentrant)
        with torch.no_grad():
            router.weight.neg_()
        output.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0][1], seen[1][1])
    assert torch.equal(seen[1][0] != 0, seen[1][1])
    assert router.tokens_per_expert.sum() == 12 * TOPK


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "how",
    ["recompute", "record", "recompute in record", "replay", "recompute in replay", "replay of free rows"],
)
def test_quantiles_are_counted_once_where_the_router_chooses(how: str, use_reentrant: bool) -> None:
    fields = {"moe_router_load_balancing_type": "quantile_balancing"}
    plain, router = _router(**EXACT, **fields), _router(**EXACT, **fields)
    hidden, records = _hidden(12).requires_grad_(), RoutingRecords()
    plain(hidden)[0].sum().backward()
    through = recompute if how.startswith("recompute") else checkpoint
    has_choice = "replay" not in how  # a replay counts nothing, or ranks would have to have free rows together
    if "replay" in how:
        ids = torch.tensor([[0, 1]]).repeat(12, 1)
        ids[7:] = -1 if how.endswith("free rows") else ids[7:]
        records.set("", ids)
    if how == "recompute":
        recompute(router, hidden, use_reentrant=use_reentrant)[0].sum().backward()
    else:
        with getattr(records, "replay" if "replay" in how else "record")(router):
            through(router, hidden, use_reentrant=use_reentrant)[0].sum().backward()
    assert plain.qb_beta_count == 1
    assert plain.qb_beta_sum.abs().sum() > 0
    assert router.qb_beta_count == int(has_choice)
    assert torch.equal(router.qb_beta_sum, plain.qb_beta_sum * router.qb_beta_count)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "through", [recompute, lambda module, x, **how: checkpoint(module, x, **how)], ids=["ours", "torch"]
)
def test_counters_and_gradients_of_three_micro_batches(through: Callable[..., Tensor], use_reentrant: bool) -> None:
    losses = {
        "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    plain, recomputed = _model(**losses), _model(**losses)
    for number in range(3):
        part = _hidden(9, seed=number).requires_grad_()
        plain(part).square().mean().backward()
        through(recomputed, part, use_reentrant=use_reentrant).square().mean().backward()
    for left, right in zip(plain.routers(), recomputed.routers(), strict=True):
        assert left.tokens_per_expert.sum() == 3 * 9 * TOPK
        assert left.global_tokens[-1] == 3 * 9
        for (name, buffer), other in zip(left.named_buffers(), right.buffers(), strict=True):
            assert torch.equal(buffer, other), name
    for (name, left), right in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert_close(right.grad, left.grad, what=name)


def test_recompute_takes_keywords_and_runs_on_other_threads() -> None:
    model, hidden = _model().first, _hidden(12).view(4, 3, HIDDEN_SIZE).requires_grad_()
    padding = torch.zeros(4, 3, dtype=torch.bool)
    padding[3, 1:] = True
    output = recompute(model, hidden, padding_mask=padding)
    assert torch.equal(output, model(hidden, padding))
    thread = threading.Thread(target=lambda: output.sum().backward())
    thread.start()
    thread.join()
    assert hidden.grad.abs().sum() > 0
    assert model.router.tokens_per_expert.sum() == 10 * TOPK


def test_a_language_model_is_replayed_in_training_and_evaluation() -> None:
    sizes = {"hidden_size": 8, "num_layers": 3, "num_attention_heads": 2, "vocab_size": 11, "moe_layer_freq": (0, 1, 1)}
    config = TransformerConfig(**sizes, num_moe_experts=4, moe_ffn_hidden_size=8, init_method_std=1.0)
    torch.manual_seed(0)
    model = MoEGPT(config)
    tokens, records = torch.randint(11, (2, 7)), RoutingRecords()
    with records.record(model):
        loss = model(tokens, tokens)
        loss.backward()
    assert records.layer_names == ("layers.1.mlp.router", "layers.2.mlp.router")
    assert records.to_dense().shape == (14, 2, TOPK)
    with records.replay(model.eval()), torch.no_grad():
        assert torch.equal(model(tokens, tokens), loss)


def test_free_rows_leave_the_choice_to_the_router() -> None:
    router, hidden = _router(**EXACT), _hidden(4)
    own = router(hidden)[1]
    records = RoutingRecords()
    records.set("", torch.tensor([[4, 0], [-1, -1], [1, 2], [-1, -1]], dtype=torch.int16))
    with records.replay(router):
        routing_map = router(hidden)[1]
    assert routing_map[[0, 2]].long().tolist() == [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
    assert torch.equal(routing_map[[1, 3]], own[[1, 3]])


@pytest.mark.parametrize("fused", [False, True])
def test_losses_count_the_own_choice_of_a_router_whose_ids_are_forced(fused: bool) -> None:
    options = {**EXACT, "moe_router_fusion": fused, "moe_aux_loss_coeff": 1.0}
    own, forced, hidden, records = _router(**options), _router(**options), _hidden(12), RoutingRecords()
    records.set("", torch.tensor([[0, 1]]).repeat(12, 1))
    own(hidden)
    with records.replay(forced):
        forced(hidden)[0].sum().backward()
    assert own.aux_loss > 0
    assert torch.equal(forced.aux_loss, own.aux_loss)
    assert forced.tokens_per_expert.tolist() == [12, 12, 0, 0, 0]


def test_blocks_nest_and_the_inner_one_decides() -> None:
    router, hidden = _router(**EXACT), _hidden(3)
    ids, others = torch.tensor([[0, 1], [2, 4], [3, 1]]), torch.tensor([[4, 3], [1, 0], [2, 0]])
    forced, others = RoutingRecords.from_dense(ids.unsqueeze(1), [""]), RoutingRecords.from_dense(others[:, None], [""])
    inside, around = RoutingRecords(), RoutingRecords()
    with forced.replay(router), inside.record(router):
        router(hidden)
    with around.record(router), forced.replay(router):
        router(hidden)
    for records in (inside, around):
        assert torch.equal(records.get("").long(), ids)
    with others.replay(router):
        with forced.replay(router):
            assert torch.equal(router(hidden)[1].nonzero()[:, 1].view(3, 2), ids.sort().values)
        assert torch.equal(router(hidden)[1].nonzero()[:, 1].view(3, 2), others.get("").sort().values)
    assert router.recorder is None


def test_a_replay_drops_by_its_own_ids_whatever_the_record_around_it_dropped() -> None:
    router, hidden = _router(**EXACT, moe_expert_capacity_factor=0.5), _hidden(12)
    records = RoutingRecords.from_dense(torch.tensor([[0, 1]]).repeat(12, 1).unsqueeze(1), [""])
    with RoutingRecords().record(router):
        own = router(hidden)[1]
        with records.replay(router):
            forced = router(hidden)[1]
        assert torch.equal(router(hidden)[1], own)
    assert forced.sum(0).tolist() == [3, 3, 0, 0, 0]  # ceil(12 * 2 / 5 * 0.5)


def test_quantiles_are_counted_by_the_first_forward_with_a_gradient() -> None:
    router, hidden = _router(moe_router_load_balancing_type="quantile_balancing"), _hidden(12)
    with RoutingRecords().record(router):
        with torch.no_grad():
            router(hidden)
            router(hidden)
        router(hidden)[0].sum().backward()
        router(hidden)[0].sum().backward()
    assert router.qb_beta_count == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_nests(use_reentrant: bool) -> None:
    model, hidden, seen = _model(), _hidden(12).requires_grad_(), []
    model.first.router.register_forward_hook(lambda module, args, result: seen.append(result[1]))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, hidden: Tensor) -> Tensor:
            return recompute(self.inner, hidden * 2.0, use_reentrant=use_reentrant).tanh()

    output = recompute(Outer(), hidden, use_reentrant=use_reentrant)
    _flip_all(model)
    output.sum().backward()
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert model.first.router.tokens_per_expert.sum() == 12 * TOPK


def test_a_block_that_raises_records_nothing_and_restores_the_outer_one() -> None:
    model, hidden, outer, inner = _model(), _hidden(12), RoutingRecords(), RoutingRecords()

    def stop(*args: object) -> None:
        raise RuntimeError("stop")

    with outer.record(model):
        recorders = [router.recorder for router in model.routers()]
        handle = model.second.router.register_forward_hook(stop)
        with pytest.raises(RuntimeError, match="stop"), inner.record(model):
            model(hidden)
        handle.remove()
        assert [router.recorder for router in model.routers()] == recorders
        model(hidden)
    assert (len(inner), len(outer)) == (0, 2)
    with inner.record(model):
        model(hidden)
    assert torch.equal(inner.to_dense(), outer.to_dense())


def test_dense_layout_and_files_round_trip(tmp_path: Path) -> None:
    ids = torch.stack([torch.randperm(9)[:3] for _ in range(14)]).view(7, 2, 3)
    ids[-1] = -1
    records = RoutingRecords.from_dense(ids, ["layers.1.mlp.router", "layers.10.mlp.router"], micro_batch=4)
    records.set("layers.1.mlp.router", ids[:5, 0], micro_batch=5)
    assert torch.equal(records.to_dense(4).long(), ids)
    assert repr(records) == "RoutingRecords(layers=2, micro_batches=[4, 5])"
    path = tmp_path / "routes.safetensors"
    path.write_bytes(b"older")
    records.save(path)
    loaded = RoutingRecords.load(path)
    assert (loaded.layer_names, loaded.micro_batches, len(loaded)) == (records.layer_names, records.micro_batches, 3)
    assert torch.equal(loaded.to_dense(4).long(), ids)
    assert torch.equal(loaded.get("layers.1.mlp.router", 5).long(), ids[:5, 0])
    assert list(loaded) == [("layers.1.mlp.router", 4), ("layers.10.mlp.router", 4), ("layers.1.mlp.router", 5)]
    assert ("layers.10.mlp.router", 5) not in loaded
    assert [file.name for file in tmp_path.iterdir()] == ["routes.safetensors"]
    loaded.drop(4)
    loaded.drop(4)
    assert (loaded.micro_batches, len(loaded)) == ((5,), 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole safetensors file"),
        (b"\x80\x04cos\nsystem\n", "is not a whole safetensors file"),
        ({"tensors": {"0/a": torch.zeros(1, 2)}, "metadata": {}}, "does not hold routing records"),
        ({"tensors": {"0/a": torch.ones(1, 2)}, "order": '["0/b"]'}, "does not name the tensors that are there"),
        ({"tensors": {"0/a": torch.ones(1, 2)}, "order": "["}, "is not a whole safetensors file"),
        ({"tensors": {"0/a": torch.ones(1, 2)}, "order": "[" * 100_000}, "is not a whole safetensors file"),
        ({"tensors": {"0": torch.ones(1, 2)}, "order": "[0]"}, "does not name the tensors that are there"),
        ({"tensors": {"0": torch.ones(1, 2)}, "order": '["0"]'}, "'0' is not MICRO-BATCH/LAYER"),
        ({"tensors": {"00/a": torch.ones(1, 2)}, "order": '["00/a"]'}, "'00/a' is not MICRO-BATCH/LAYER"),
        ({"tensors": {"x/a": torch.ones(1, 2)}, "order": '["x/a"]'}, "'x/a' is not MICRO-BATCH/LAYER"),
        ({"tensors": {"0/a": torch.ones(1, 2)}, "order": '["0/a"]'}, r"Ids of a \(\[1, 2\], torch.float32\) must be"),
        ({"tensors": {"0/a": torch.ones(1, 2).int()}, "order": '["0/a"]'}, r"row 0 is \[1, 1\]"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | dict, message: str) -> None:
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        metadata = {"format": "moe-pipeline routing records, version 1", "order": content.get("order", "[]")}
        save_file(content["tensors"], path, metadata=content.get("metadata", metadata))
    with pytest.raises(ValueError, match=message):
        RoutingRecords.load(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    records = RoutingRecords.from_dense(torch.arange(6).view(3, 1, 2), ["a"])
    records.save(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for length in (7, 40, len(content) - 1):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            RoutingRecords.load(tmp_path / "cut")


def test_a_save_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, path = RoutingRecords.from_dense(torch.arange(6).view(3, 1, 2), ["a"]), tmp_path / "routes"
    records.save(path)
    content = path.read_bytes()

    def fail(tensors: object, path: Path, **how: object) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        records.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["routes"]
    assert path.read_bytes() == content


def test_a_missing_safetensors_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (RoutingRecords().save, RoutingRecords.load):
        with pytest.raises(ImportError, match=r'pip install "moe-pipeline\[replay\]"'):
            call(tmp_path / "file")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 1], [3, 3]]), r"unique, from 0 to 2147483647 in each row, or all -1; row 1 is \[3, 3\]"),
        (torch.tensor([[0, 1], [-1, 2]]), r"row 1 is \[-1, 2\]"),
        (torch.tensor([[-2, -2]]), r"row 0 is \[-2, -2\]"),
        (torch.tensor([[1 << 40, 0]]), "row 0 is"),
        (torch.tensor([0, 1]), r"Ids of a \(\[2\], torch.int64\) must be \[T, K\] integers"),
        (torch.zeros(2, 2), r"Ids of a \(\[2, 2\], torch.float32\)"),
        (torch.zeros(2, 0).long(), r"Ids of a \(\[2, 0\], torch.int64\) must be \[T, K\] integers"),
        (torch.ones(1, 1, dtype=torch.uint64), r"Ids of a \(\[1, 1\], torch.uint64\)"),
        (torch.ones(1, 1, dtype=torch.complex64), r"Ids of a \(\[1, 1\], torch.complex64\)"),
        (torch.ones(1, 1, dtype=torch.bool), r"Ids of a \(\[1, 1\], torch.bool\)"),
    ],
)
def test_bad_ids_are_refused_when_they_come_in(ids: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingRecords().set("a", ids)


def test_dense_ids_need_a_name_for_each_layer() -> None:
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match=r"expert_ids \(\[3, 2, 2\]\) must be \[T, layers, K\] with a name"):
            RoutingRecords.from_dense(torch.zeros(3, 2, 2).long(), names)
    with pytest.raises(ValueError, match=r"expert_ids \(\[3, 2\]\) must be \[T, layers, K\]"):
        RoutingRecords.from_dense(torch.zeros(3, 2).long(), ["a", "b"])
    ids = torch.tensor([[[0, 3]], [[-1, -1]]])
    assert torch.equal(RoutingRecords.from_dense(ids, ["a"], num_experts=4).to_dense().long(), ids)
    with pytest.raises(ValueError, match=r"from 0 to 2 in each row, or all -1; row 0 is \[0, 3\]"):
        RoutingRecords.from_dense(ids, ["a"], num_experts=3)
    uneven = RoutingRecords()
    uneven.set("a", torch.tensor([[0, 1]]))
    uneven.set("b", torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match=r"Layers of one shape .* \[\[1, 2\], \[2, 2\]\]"):
        uneven.to_dense()


def test_what_does_not_fit_is_named() -> None:
    model, hidden, records = _model(), _hidden(12), RoutingRecords()
    with records.record(model):
        model(hidden)
    with pytest.raises(ValueError, match=r"micro_batch \(0\) of .* is recorded; take another"), records.record(model):
        pass
    with pytest.raises(ValueError, match=r"micro_batch \(1\) .* without a record \['first.router', 'second.router'\]"):
        records.replay(model, 1).__enter__()
    with pytest.raises(
        ValueError, match=r"without a record \[''\], without a router \['first.router', 'second.router'\]"
    ):
        records.replay(model.first.router).__enter__()
    with pytest.raises(ValueError, match=r"record of first\.router has 12 tokens, but 7 came"), records.replay(model):
        model(_hidden(7))
    assert [router.recorder for router in model.routers()] == [None, None]
    with pytest.raises(ValueError, match=r"There is no record of 'first\.router', micro-batch 3"):
        records.get("first.router", 3)
    records.set("second.router", torch.tensor([[0, 5]]))
    with pytest.raises(ValueError, match=r"second\.router has topk 2 and expert 5, but .* topk 2 and 5 experts"):
        records.replay(model).__enter__()
    records.set("third.router", torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match=r"without a record \[\], without a router \['third\.router'\]"):
        records.replay(model).__enter__()
    wider = RoutingRecords.from_dense(torch.arange(3).view(1, 1, 3), [""])
    with pytest.raises(ValueError, match="has topk 3 and expert 2, but its router has topk 2 and 5 experts"):
        wider.replay(_router(**EXACT)).__enter__()
    with pytest.raises(ValueError, match="router chooses by 'expert_choice', which has no K"):
        RoutingRecords().record(TwoLayers(moe_router_type="expert_choice")).__enter__()


def test_records_hold_no_graph() -> None:
    model, records, counts = _model(), RoutingRecords(), []
    for number in range(60):
        with records.record(model, number):
            model(_hidden(5))
        records.drop(number)
        if number % 20 == 19:
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] - counts[1] < 10


def test_arrays_lists_and_what_has_no_number_or_no_modules(tmp_path: Path) -> None:
    rows = [[[0, 1], [2, 3]], [[1, 0], [3, 4]]]
    expected = torch.tensor(rows)
    for ids in (rows, expected.numpy()):
        assert torch.equal(RoutingRecords.from_dense(ids, ["a", "b"]).to_dense().long(), expected)
    records = RoutingRecords()
    for number in ("a", 1.0, None, True, 10**18, -(10**18)):
        with pytest.raises(ValueError, match=r"micro_batch \(.*\) must be a whole number"):
            records.record(_model(), number).__enter__()
        with pytest.raises(ValueError, match=r"micro_batch \(.*\) must be a whole number"):
            records.set("a", expected[0], number)
    with pytest.raises(FileNotFoundError, match=r"The folder of .*nowhere.file is not there"):
        records.save(tmp_path / "nowhere" / "file")
    with pytest.raises(ValueError, match=r"module \(function\) must be an nn.Module"):
        recompute(lambda x: x, torch.ones(2))


def test_experts_that_choose_are_recomputed_without_a_record() -> None:
    model, hidden = TwoLayers(moe_router_type="expert_choice"), _hidden(12).requires_grad_()
    expected = torch.autograd.grad(model(hidden).sum(), hidden)[0]
    assert torch.equal(torch.autograd.grad(recompute(model, hidden).sum(), hidden)[0], expected)


@pytest.mark.parametrize("how", ["plain", "non-reentrant", "recompute"])
def test_a_frozen_gate_on_a_fixed_input_counts_once(how: str) -> None:
    layer = _model(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True).first
    layer.router.requires_grad_(False)
    hidden = _hidden(9)  # takes no gradient
    if how == "plain":
        output = layer(hidden)
    else:
        output = recompute(layer, hidden) if how == "recompute" else checkpoint(layer, hidden, use_reentrant=False)
    output.sum().backward()
    assert layer.router.tokens_per_expert.sum() == 9 * TOPK
    assert layer.router.local_tokens_per_expert.sum() == 9 * TOPK


@pytest.mark.parametrize("block", ["record", "replay"])
def test_a_forward_under_inference_mode_comes_before_training(block: str) -> None:
    model, hidden, records = _model(moe_expert_capacity_factor=0.7), _hidden(12), RoutingRecords()
    expected = model(hidden)
    if block == "replay":
        with records.record(model):
            model(hidden)
    with getattr(records, block)(model):
        with torch.inference_mode():
            seen = model(hidden)
        output = model(hidden)
        output.sum().backward()
    assert torch.equal(output, expected)
    assert torch.equal(seen, expected)
