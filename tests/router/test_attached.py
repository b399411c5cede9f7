"""The scale rule: what balancing losses do to the router's gradient over ranks, micro-batches and packed sequences."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import ProcessGroups, finalize_gradients
from router import RouterConfig, TopKRouter, recompute
from tests import reference
from tests.ranks import run_ranks
from tests.tolerances import assert_close

HIDDEN_SIZE, NUM_EXPERTS, TOPK = 6, 5, 2
SEQ_LENGTH, NUM_SEQUENCES = 13, 4
COEFFS = {"aux_loss": 0.3, "seq_aux_loss": 0.7, "global_aux_loss": 0.5, "z_loss": 0.02}
LENGTHS = torch.tensor([13, 4, 9, 1])  # valid tokens of each sequence where padding is tested


@dataclass(frozen=True)
class Layout:
    """How one global batch is cut: ranks that share a sequence, and the micro-batches of each data-parallel rank."""

    tp: int
    cp: int
    num_microbatches: int


def _layouts(world_size: int) -> list[Layout]:
    folds = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4) if world_size % (tp * cp) == 0]
    return [
        Layout(tp, cp, parts)
        for tp, cp in folds
        for parts in (1, 2, 4)
        if world_size // (tp * cp) * parts <= NUM_SEQUENCES
    ]


def _hidden() -> Tensor:
    """[S, sequences, H]"""
    generator = torch.Generator().manual_seed(8)
    return torch.randn(SEQ_LENGTH, NUM_SEQUENCES, HIDDEN_SIZE, generator=generator, dtype=torch.float64)


def _padding() -> Tensor:
    return torch.arange(SEQ_LENGTH).unsqueeze(1) >= LENGTHS  # [S, sequences]


def _router(groups: ProcessGroups | None, names: list[str], **fields: object) -> TopKRouter:
    losses = [name for name in names if name != "z_loss"]
    if losses:
        fields["moe_router_load_balancing_type"] = losses
        fields["moe_aux_loss_coeff"] = [COEFFS[name] for name in losses]
    config = RouterConfig(
        hidden_size=HIDDEN_SIZE,
        num_moe_experts=NUM_EXPERTS,
        params_dtype=torch.float64,
        moe_router_dtype="fp64",
        moe_z_loss_coeff=COEFFS["z_loss"] if "z_loss" in names else 0.0,
        **fields,
    )
    torch.manual_seed(3)
    router = TopKRouter(config, groups)
    with torch.no_grad():
        router.weight.copy_(torch.randn(NUM_EXPERTS, HIDDEN_SIZE, dtype=torch.float64))
    return router


def _rank_part(groups: ProcessGroups) -> slice:
    """The uneven slice of every sequence that this rank of tp_cp holds; one rank may hold nothing."""
    sizes = {1: [13], 2: [4, 9], 4: [0, 5, 1, 7]}[groups.tp_cp.size()]
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return slice(*list(pairwise(bounds))[groups.tp_cp.rank()])


def _run(layouts: list[Layout], names: list[str], fields: dict[str, object], padded: bool) -> list[dict[str, Tensor]]:
    results = []
    for layout in layouts:
        groups = ProcessGroups.build(tensor_model_parallel_size=layout.tp, context_parallel_size=layout.cp)
        router = _router(groups, names, **fields)
        part, chunks = _rank_part(groups), groups.dp.size() * layout.num_microbatches
        num_tokens = 0
        for index in range(layout.num_microbatches):
            # micro-batch j of all ranks together is a run of sequences: the same cut for every number of ranks
            chunk = index * groups.dp.size() + groups.dp.rank()
            hidden = _hidden().chunk(chunks, dim=1)[chunk][part]
            padding = _padding().chunk(chunks, dim=1)[chunk][part] if padded else None
            probs, _ = router(hidden, padding)
            (probs * 0.0).sum().backward()
            num_tokens += hidden[..., 0].numel() if padding is None else int((~padding).sum())
        of_all_slices = torch.tensor(num_tokens)
        dist.all_reduce(of_all_slices, group=groups.tp)
        per_token = of_all_slices if router.config.calculate_per_token_loss else None
        finalize_gradients(router, groups, layout.num_microbatches, num_tokens=per_token)
        losses = torch.stack([getattr(router, name) for name in names]) / dist.get_world_size()
        dist.all_reduce(losses)
        results.append({"gradient": router.weight.grad, "losses": losses})
    return results


def _global_loss(parts: list[Tensor], score_function: str) -> list[Tensor]:
    """The global loss of each micro-batch [T, E] by its own formula: counts of all so far, scores of this one."""
    counts, tokens, losses = torch.zeros(NUM_EXPERTS, dtype=torch.float64), 0, []
    for logits in parts:
        scores = torch.softmax(reference.log_scores(logits, score_function), -1)
        counts = counts + reference.largest(scores, TOPK).sum(0)
        tokens += len(logits)
        losses.append(NUM_EXPERTS * (counts / (TOPK * tokens) * scores.sum(0) / len(logits)).sum())
    return losses


def _expected(
    weight: Tensor, name: str, layout: Layout, dp_size: int, fields: dict[str, object], padded: bool
) -> Tensor:
    """The loss of the whole step, without coefficient."""
    score_function = fields.get("moe_router_score_function", "softmax")
    logits, padding = _hidden() @ weight.t(), _padding() if padded else torch.zeros_like(_padding())

    def valid(chunks: int) -> list[Tensor]:
        pairs = zip(logits.chunk(chunks, dim=1), padding.chunk(chunks, dim=1), strict=True)
        return [part[~mask] for part, mask in pairs]

    chunks = dp_size * layout.num_microbatches
    if name == "seq_aux_loss":  # of a micro-batch: the mean over its sequences
        each = [reference.aux_loss(part, TOPK, 1.0, score_function) for part in valid(NUM_SEQUENCES)]
        losses = [
            torch.stack(each[i : i + NUM_SEQUENCES // chunks]).mean()
            for i in range(0, NUM_SEQUENCES, NUM_SEQUENCES // chunks)
        ]
    elif name == "global_aux_loss":
        chunks = layout.num_microbatches
        losses = _global_loss(valid(chunks), score_function)
    elif name == "z_loss":
        losses = [reference.z_loss(part, 1.0) for part in valid(chunks)]
    else:
        losses = [reference.aux_loss(part, TOPK, 1.0, score_function) for part in valid(chunks)]
    tokens = torch.tensor([len(part) for part in valid(chunks)], dtype=torch.float64)
    shares = (
        tokens / tokens.sum() if fields.get("calculate_per_token_loss") else torch.full_like(tokens, 1 / len(tokens))
    )
    return (torch.stack(losses) * shares).sum()


CASES = {
    "aux": (["aux_loss"], {}, False),
    "seq": (["seq_aux_loss"], {"moe_router_fusion": True}, False),
    "global": (["global_aux_loss"], {}, False),
    "z": (["z_loss"], {}, False),
    "all, sigmoid": (list(COEFFS), {"moe_router_score_function": "sigmoid", "moe_router_fusion": True}, False),
    "all, padded": (list(COEFFS), {"moe_router_score_function": "sqrtsoftplus"}, True),
    "all, per token": (list(COEFFS), {"calculate_per_token_loss": True}, False),
    "all, per token, padded": (list(COEFFS), {"calculate_per_token_loss": True, "moe_router_fusion": True}, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradient_over_ranks_and_micro_batches(world_size: int, case: str) -> None:
    names, fields, padded = CASES[case]
    layouts = _layouts(world_size)
    ranks = run_ranks(_run, world_size, layouts, names, fields, padded)
    weight = _router(None, names, **fields).weight
    for index, layout in enumerate(layouts):
        dp_size = world_size // (layout.tp * layout.cp)
        objective = sum(COEFFS[name] * _expected(weight, name, layout, dp_size, fields, padded) for name in names)
        (gradient,) = torch.autograd.grad(objective, weight)
        assert gradient.abs().max() > 1e-4
        for result in ranks:
            assert_close(result[index]["gradient"], gradient, what=f"gradient, {layout}")


def test_cuts_that_must_not_matter_do_not() -> None:
    """Expected values of other cuts are the same where the definition does not depend on the cut."""
    weight = _router(None, ["aux_loss"]).weight
    whole = Layout(1, 1, 1)
    for name in ("seq_aux_loss", "z_loss"):
        values = [_expected(weight, name, Layout(1, 1, parts), dp, {}, False) for parts, dp in ((1, 1), (2, 2), (1, 4))]
        for value in values[1:]:
            assert_close(value, values[0])
    assert_close(
        _expected(weight, "global_aux_loss", whole, 4, {}, False), _expected(weight, "aux_loss", whole, 1, {}, False)
    )
    assert (
        _expected(weight, "aux_loss", whole, 4, {}, False) - _expected(weight, "aux_loss", whole, 1, {}, False)
    ).abs() > 1e-3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_logged_values_are_the_losses(world_size: int) -> None:
    layouts = [layout for layout in _layouts(world_size) if layout.num_microbatches == 1]
    ranks = run_ranks(_run, world_size, layouts, list(COEFFS), {}, True)
    weight = _router(None, ["aux_loss"]).weight.detach()
    for index, layout in enumerate(layouts):
        dp_size = world_size // (layout.tp * layout.cp)
        expected = torch.stack([_expected(weight, name, layout, dp_size, {}, True) for name in COEFFS])
        for result in ranks:
            assert_close(result[index]["losses"], expected, torch.float32, what=str(layout))


def test_a_new_step_starts_new_global_counts() -> None:
    router, hidden = _router(None, ["global_aux_loss"]), _hidden()
    groups = ProcessGroups.build()
    gradients = []
    for _ in range(2):
        router.zero_grad()
        for part in hidden.chunk(2, dim=1):
            (router(part)[0] * 0.0).sum().backward()
        assert router.global_tokens[-1] == SEQ_LENGTH * NUM_SEQUENCES
        finalize_gradients(router, groups, 2)
        assert not router.global_tokens.any()
        gradients.append(router.weight.grad.clone())
    assert torch.equal(*gradients)


def _packed(bounds: list[int]) -> tuple[Tensor, Tensor]:
    """This rank's gradient and logged loss for sequences packed into one row, cut between ranks anywhere."""
    groups = ProcessGroups.build(tensor_model_parallel_size=dist.get_world_size())
    router = _router(groups, ["seq_aux_loss", "z_loss"])
    tokens = _hidden().transpose(0, 1).reshape(-1, 1, HIDDEN_SIZE)  # [S * sequences, 1, H], one after another
    ranks = torch.linspace(0, len(tokens), dist.get_world_size() + 1).long().tolist()
    start, end = ranks[groups.tp_cp.rank()], ranks[groups.tp_cp.rank() + 1]
    offsets = torch.tensor(bounds).clamp(start, end) - start
    probs, _ = router(tokens[start:end], cu_seqlens=offsets)
    (probs * 0.0).sum().backward()
    finalize_gradients(router, groups)
    loss = router.seq_aux_loss / dist.get_world_size()
    dist.all_reduce(loss)
    return router.weight.grad, loss


@pytest.mark.parametrize("bounds", [[0, 13, 26, 39, 52], [0, 1, 30, 30, 52], [0, 20, 41]], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_packed_sequences_are_the_mean_of_single_runs(world_size: int, bounds: list[int]) -> None:
    weight = _router(None, ["seq_aux_loss"]).weight
    logits = _hidden().transpose(0, 1).reshape(-1, HIDDEN_SIZE) @ weight.t()
    parts = [logits[start:end] for start, end in pairwise(bounds) if end > start]
    loss = torch.stack([reference.aux_loss(part, TOPK, 1.0) for part in parts]).mean()
    objective = COEFFS["seq_aux_loss"] * loss + reference.z_loss(logits, COEFFS["z_loss"])
    (gradient,) = torch.autograd.grad(objective, weight)
    for actual, logged in run_ranks(_packed, world_size, bounds):
        assert_close(actual, gradient)
        assert_close(logged, loss, torch.float32)


@pytest.mark.parametrize("name", [name for name in COEFFS if name != "z_loss"])
def test_loss_scale_scales_the_attached_gradient_alone(name: str) -> None:
    router, hidden = _router(None, [name]), _hidden()
    gradients = []
    for scale in (1.0, 1024.0):
        router.zero_grad()
        router.loss_scale.fill_(scale)
        (router(hidden)[0] * 0.0).sum().backward()
        gradients.append(router.weight.grad.clone())
        finalize_gradients(router, ProcessGroups.build())
    assert_close(gradients[1], 1024.0 * gradients[0])
    before = getattr(router, name).clone()
    router.loss_scale.fill_(1.0)
    router(hidden)
    assert torch.equal(getattr(router, name), before)


@pytest.mark.parametrize("per_token", [False, True])
def test_token_counts_belong_to_per_token_losses(per_token: bool) -> None:
    router = _router(None, ["aux_loss"], calculate_per_token_loss=per_token)
    num_tokens = None if per_token else 7
    with pytest.raises(
        ValueError, match=rf"num_tokens \({num_tokens}\) belongs to calculate_per_token_loss \({per_token}"
    ):
        finalize_gradients(router, ProcessGroups.build(), num_tokens=num_tokens)


def _accumulated(how: str, batches: list[Tensor], *, late: bool) -> tuple[Tensor, Tensor]:
    """The router's gradient and its counts after all batches; late: every forward before the first backward."""
    router, pending = _router(None, ["global_aux_loss", "z_loss"]), []
    for hidden in batches:
        if how == "plain":
            probs, _ = router(hidden)
        elif how == "recompute":
            probs, _ = recompute(router, hidden)
        else:
            probs, _ = checkpoint(router, hidden, use_reentrant=how == "reentrant")
        pending.append((probs * 0.0).sum())
        if not late:
            pending.pop().backward()
    for loss in pending:
        loss.backward()
    return router.weight.grad, router.global_tokens


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("how", ["non-reentrant", "reentrant", "recompute"])
def test_global_counts_of_a_repeated_forward_are_those_of_the_first(how: str, late: bool) -> None:
    batches = [part.clone().requires_grad_() for part in _hidden().chunk(2, dim=1)]
    # a reentrant checkpoint has its graph from the repetition alone, so that its counts so far are those of that moment
    expected, counts = _accumulated("plain", batches, late=late and how != "reentrant")
    gradient, actual_counts = _accumulated(how, batches, late=late)
    assert_close(gradient, expected)
    assert torch.equal(actual_counts, counts)


def test_a_second_backward_through_a_repeated_forward_gives_the_same() -> None:
    router, hidden = _router(None, ["global_aux_loss"]), _hidden().requires_grad_()
    probs, _ = checkpoint(router, hidden, use_reentrant=False)
    gradients = [torch.autograd.grad((probs * 0.0).sum(), router.weight, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (0, 0)], ids=str)
def test_a_batch_without_sequences_or_tokens(shape: tuple[int, int]) -> None:
    router = _router(None, list(COEFFS))
    probs, _ = router(torch.zeros(*shape, HIDDEN_SIZE, dtype=torch.float64, requires_grad=True))
    probs.sum().backward()
    assert not router.weight.grad.any()
