"""The DeepEP dispatchers over a stand-in for the library: the same signatures and demands, gloo underneath."""

import builtins
import importlib
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatchers import DispatcherConfig, MoEAlltoAllTokenDispatcher, TokenDispatcher, gather_rows, sum_rows
from moe import MoEConfig, ProcessGroups
from moe.dispatching import build_dispatcher
from tests.ranks import run_ranks
from tests.tolerances import assert_close

NUM_EXPERTS, HIDDEN, TOKENS = 8, 16, (5, 0, 9, 3)


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"the library demands {what}")


def everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class SizeHints:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Stands in for deep_ep.Buffer."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> SizeHints:
        return SizeHints()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        demand(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "contiguous int64 ids")
        routed = torch.zeros(topk_idx.shape[0], num_experts + 1, dtype=torch.bool)
        routed = routed.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)[:, :-1]
        in_rank = routed.view(len(routed), self.group.size(), num_experts // self.group.size()).any(-1)
        return in_rank.sum(0).int(), None, routed.sum(0).int(), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Any, ...]:
        demand(x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] * 2 % 16 == 0, "rows of 16 bytes in bf16")
        demand(x.nbytes <= 1 << 30 and self.num_nvl_bytes >= x.shape[1] * 2, "a large enough buffer")
        rank = self.group.rank()
        if handle is not None:
            demand(topk_idx is None and topk_weights is None, "a handle alone")
            sent = everyones((x, handle["mine"]))
            return torch.cat([rows[mine[:, rank]] for rows, mine in sent]), None, None, None, handle, None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert num_tokens_per_rank is not None
        assert topk_idx is not None
        assert topk_weights is not None
        demand(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "fp32 weights [T, K]")
        num_local = num_tokens_per_expert.shape[0] // self.group.size()
        sent = everyones((x, topk_idx, topk_weights.detach(), is_token_in_rank))
        ids = torch.cat([i[mine[:, rank]] for _, i, _, mine in sent]) - rank * num_local
        is_here = (ids >= 0) & (ids < num_local)
        ids = ids.where(is_here, -1)
        weights = torch.cat([w[mine[:, rank]] for _, _, w, mine in sent]).where(is_here, 0.0)
        counts = [int((ids == expert).sum()) for expert in range(num_local)]
        held = {"mine": is_token_in_rank, "num_tokens": len(x)}
        return torch.cat([rows[mine[:, rank]] for rows, _, _, mine in sent]), ids, weights, counts, held, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Any, ...]:
        demand(x.dtype == torch.bfloat16 and x.is_contiguous(), "contiguous rows in bf16")
        rank, everything = self.group.rank(), everyones((x, topk_weights, handle["mine"]))
        rows = torch.zeros(handle["num_tokens"], x.shape[1])
        weights = None if topk_weights is None else torch.zeros(handle["num_tokens"], topk_weights.shape[1])
        for peer, (theirs, their_weights, _) in enumerate(everything):
            first = sum(int(mine[:, peer].sum()) for _, _, mine in everything[:rank])
            tokens = handle["mine"][:, peer].nonzero().flatten()
            rows.index_add_(0, tokens, theirs[first : first + len(tokens)].float())
            if weights is not None:
                weights.index_add_(0, tokens, their_weights[first : first + len(tokens)])
        return rows.bfloat16(), weights, None


class HybridEPBuffer:
    """Stands in for deep_ep.HybridEPBuffer."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool,
    ) -> None:
        self.group, self.hidden_dim, self.num_local = group, hidden_dim, num_local_experts
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        demand(not use_fp8, "no fp8")

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        handle: Any = None,
        num_permuted_tokens: int | None = None,
    ) -> tuple[Any, ...]:
        demand(hidden.dtype == torch.bfloat16 and hidden.is_contiguous(), "contiguous rows in bf16")
        demand(len(hidden) % 64 == 0 and len(hidden) <= self.max_num_of_tokens_per_rank, "whole chunks of tokens")
        if handle is None:
            assert routing_map is not None
            assert probs is not None
            demand(routing_map.dtype == torch.bool and probs.dtype == torch.float32, "a bool map and fp32 probs")
            demand(num_of_experts_per_rank == self.num_local, "the number of local experts")
            handle = {"maps": everyones(routing_map)}
            demand(len({len(m) for m in handle["maps"]}) == 1, "the same number of tokens on every rank")
            probs_of = everyones(probs.detach())
        else:
            demand(num_permuted_tokens is not None and probs is None, "a handle and its number of slots")
            probs_of = None
        rows_of, first = everyones(hidden), self.group.rank() * self.num_local
        rows, weights, counts = [], [], []
        for expert in range(first, first + self.num_local):
            counts.append(sum(int(m[:, expert].sum()) for m in handle["maps"]))
            for peer, routed in enumerate(handle["maps"]):
                rows.append(rows_of[peer][routed[:, expert]])
                if probs_of is not None:
                    weights.append(probs_of[peer][routed[:, expert], expert])
        return torch.cat(rows), torch.cat(weights) if weights else None, None, torch.tensor(counts), handle

    def combine_with_unpermute(self, *, hidden: Tensor, probs: Tensor | None, handle: Any) -> tuple[Any, ...]:
        demand(hidden.dtype == torch.bfloat16 and hidden.is_contiguous(), "contiguous rows in bf16")
        rank, maps, everything = self.group.rank(), handle["maps"], everyones((hidden, probs))
        rows = torch.zeros(len(maps[rank]), hidden.shape[1])
        weights = None if probs is None else torch.zeros(maps[rank].shape)
        for peer, (theirs, their_probs) in enumerate(everything):
            start = 0
            for expert in range(peer * self.num_local, (peer + 1) * self.num_local):
                for source, routed in enumerate(maps):
                    tokens = routed[:, expert].nonzero().flatten()
                    if source == rank:
                        rows.index_add_(0, tokens, theirs[start : start + len(tokens)].float())
                        if weights is not None:
                            weights[tokens, expert] = their_probs[start : start + len(tokens)]
                    start += len(tokens)
        return rows.bfloat16(), weights


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import deep_ep` find the stand-in."""
    module = types.ModuleType("deep_ep")
    module.Buffer, module.HybridEPBuffer = Buffer, HybridEPBuffer
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.delitem(sys.modules, "dispatchers.deepep_dispatcher", raising=False)


def config_of(backend: str, **fields: Any) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "num_moe_experts": NUM_EXPERTS, "moe_ffn_hidden_size": 4, "moe_router_topk": 3}
    kind = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    return MoEConfig(**(sizes | kind | {"params_dtype": torch.bfloat16} | fields))


def travel(dispatcher: TokenDispatcher[Any], kind: str) -> dict[str, Tensor]:
    """Run dispatch, experts that return their input times the prob and a number of their own, combine and backward."""
    rank, first = dist.get_rank(), dispatcher.ep_group.rank * dispatcher.num_local_experts
    num_tokens = 0 if kind == "no tokens" else TOKENS[rank]
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    scores[:, 2] = 0  # an expert without a token
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(3).indices, True)
    routing_map[1:2] = False
    probs = (torch.rand(num_tokens, NUM_EXPERTS, generator=generator) * routing_map).requires_grad_()
    hidden = torch.randn(num_tokens, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
    expert_input, plan = dispatcher.dispatch(hidden, probs, routing_map)
    real = expert_input.row_ids >= 0
    factor = torch.arange(first, first + dispatcher.num_local_experts) / 4 + 1
    factor = factor.repeat_interleave(expert_input.tokens_per_expert)[real]
    rows = gather_rows(expert_input.tokens, expert_input.row_ids[real])
    rows = (rows * (expert_input.probs[real] * factor).unsqueeze(-1)).bfloat16()
    output = dispatcher.combine(sum_rows(rows, expert_input.row_ids[real], expert_input.tokens.shape[0]), plan)
    (output.float() * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    counts = expert_input.tokens_per_expert
    assert counts.tolist() == list(expert_input.tokens_per_expert_list)
    assert hidden.grad is not None
    assert probs.grad is not None
    return {"output": output.detach(), "hidden": hidden.grad, "probs": probs.grad * routing_map, "counts": counts}


def equal_worker(backend: str, pad_multiple: int) -> list[str]:
    groups, found = ProcessGroups.build(dist.get_world_size()), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        module = importlib.import_module("dispatchers.deepep_dispatcher")
        name = {"deepep": "MoEDeepEPTokenDispatcher", "hybridep": "MoEHybridEPTokenDispatcher"}[backend]
        tested = getattr(module, name)(config_of(backend), groups, pad_multiple=pad_multiple)
        plain = DispatcherConfig(num_moe_experts=NUM_EXPERTS)
        oracle = MoEAlltoAllTokenDispatcher(plain, groups, pad_multiple=pad_multiple)
        for kind in ("tokens", "no tokens", "tokens"):
            actual, expected = travel(tested, kind), travel(oracle, kind)
            for what, value in expected.items():
                try:
                    assert_close(actual[what], value, torch.bfloat16 if value.is_floating_point() else None, what)
                except AssertionError as error:
                    found.append(f"{kind}: {error}")
        operations = {operation for operation, _ in groups.counter.records}
        if groups.ep.size() > 1 and f"{backend} dispatch" not in operations:
            found.append(f"the counter knows {operations}")
    return found


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@pytest.mark.parametrize(("world_size", "pad_multiple"), [(1, 1), (2, 4), (4, 1)])
def test_equals_the_alltoall_dispatcher(backend: str, world_size: int, pad_multiple: int) -> None:
    assert run_ranks(equal_worker, world_size, backend, pad_multiple) == [[]] * world_size


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_without_the_library_the_option_and_the_way_out_are_named(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dispatchers.deepep_dispatcher", raising=False)
    importing = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "deep_ep":
            raise ImportError("No module named 'deep_ep'")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = rf"moe_flex_dispatcher_backend \('{backend}'\) needs DeepEP's module deep_ep .*choose 'deduplicated'"
    with pytest.raises(ImportError, match=text):
        build_dispatcher(config_of(backend))


def refusals_worker() -> list[str]:
    told = []
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("deepep", 1, 2, {}),
        ("hybridep", 1, 2, {}),
        ("deepep", 2, 1, {"moe_router_padding_for_quantization": True}),
        ("deepep", 2, 1, {"params_dtype": torch.float32}),
        ("hybridep", 2, 1, {"moe_check_collectives": True}),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        for backend, ep, etp, fields in cases:
            try:
                build_dispatcher(config_of(backend, **fields), ProcessGroups.build(ep, etp))
                told.append("")
            except ValueError as error:
                told.append(str(error))
    return told


def test_what_the_library_cannot_do_is_refused() -> None:
    texts = ("expert-tensor-parallel size (2)",) * 2
    texts += (
        "moe_router_padding_for_quantization (True)",
        "params_dtype (torch.float32)",
        "moe_check_collectives (True)",
    )
    for told in run_ranks(refusals_worker, 2):
        for text, message in zip(texts, told, strict=True):
            assert text in message
            assert "deduplicated" in message


def test_more_experts_than_k_are_not_lost_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    module = importlib.import_module("dispatchers.deepep_dispatcher")
    ids, weights = module._as_topk(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]]).bool(), torch.full((2, 4), 0.5), 3)
    assert ids.tolist() == [[1, 3, -1], [-1, -1, -1]]
    assert weights.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    with pytest.raises(RuntimeError, match=r"A token has more experts than topk \(1\)"):
        module._as_topk(torch.tensor([[1, 1]]).bool(), torch.ones(1, 2), 1)
