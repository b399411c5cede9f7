"""Record and replay of routing decisions, by layer name and micro-batch; recomputation that keeps its decisions."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from router.router import DecisionRecorder
from router.step import routers_of

FORMAT = "moe-pipeline routing records, version 1"
ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RoutingRecords:
    """The expert ids that routers chose, [T, K] for each layer and micro-batch.

    Layers go by their name in the model that is recorded or replayed, so a dense layer between two MoE layers shifts
    nothing. Only ids are kept and forced; weights are computed from the router's own logits, with their gradient.

    One `record` or `replay` block is one micro-batch, forward and backward: a router that runs again inside it repeats
    a forward (recomputation) and gets the same decision again. So each micro-batch needs a block of its own, and a
    module that is called twice in one forward, with different tokens, cannot be recorded. Blocks nest: a `record`
    inside a `replay` takes the replayed ids.

    Iteration goes over (layer name, micro-batch), the arguments of `get`; `len` is the number of these.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def record(self, model: nn.Module, micro_batch: int = 0) -> Iterator[RoutingRecords]:
        """Keep what every router of the model decides inside the block; nothing if the block raises.

        Raises:
            ValueError: micro_batch is no whole number or is recorded, or a router does not decide on K experts a token.
        """
        _check_number(micro_batch)
        if micro_batch in self.micro_batches:
            raise ValueError(f"micro_batch ({micro_batch}) of {self!r} is recorded; take another number or `drop` it.")
        decisions = _Decisions()
        with _attached(model, decisions, {}):
            yield self
        for name, ids in decisions.expert_ids.items():
            self._ids[name, micro_batch] = ids.to(torch.int32)

    @contextmanager
    def replay(self, model: nn.Module, micro_batch: int = 0) -> Iterator[RoutingRecords]:
        """Let every router of the model take the ids that are recorded for it.

        Raises:
            ValueError: the routers of the model are not the layers recorded for this micro-batch, or have another K or
                fewer experts; inside the block, if the number of tokens differs from the record.
        """
        routers = routers_of(model)
        recorded = {name: ids for (name, number), ids in self._ids.items() if number == micro_batch}
        missing, foreign = sorted(routers.keys() - recorded.keys()), sorted(recorded.keys() - routers.keys())
        if missing or foreign:
            raise ValueError(
                f"micro_batch ({micro_batch}) of {self!r} does not fit the model: without a record {missing}, without"
                f" a router {foreign}."
            )
        for name, router in routers.items():
            ids = recorded[name]
            topk, highest = ids.shape[1], int(ids.max()) if len(ids) else -1  # sync: before anything runs
            if topk != router.rule.topk or highest >= router.num_experts:
                raise ValueError(
                    f"The record of {name} has topk {topk} and expert {highest}, but its router has topk"
                    f" {router.rule.topk} and {router.num_experts} experts."
                )
        with _attached(model, _Decisions(), recorded):
            yield self

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers that have a record, in the order in which they came."""
        return tuple(dict.fromkeys(name for name, _ in self._ids))

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batches that have a record, in the order in which they came."""
        return tuple(dict.fromkeys(number for _, number in self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(tuple(self._ids))

    def __repr__(self) -> str:
        return f"RoutingRecords(layers={len(self.layer_names)}, micro_batches={list(self.micro_batches)})"

    def get(self, name: str, micro_batch: int = 0) -> Tensor:
        """Return the ids [T, K] int32 of a layer and micro-batch.

        Raises:
            ValueError: there is no such record.
        """
        if (name, micro_batch) not in self._ids:
            raise ValueError(f"There is no record of {name!r}, micro-batch {micro_batch}, in {self!r}.")
        return self._ids[name, micro_batch]

    def set(self, name: str, expert_ids: Tensor, micro_batch: int = 0, num_experts: int | None = None) -> None:
        """Put ids in, for example those of a rollout engine, in place of a record that may be there.

        Args:
            name: the router's name in the model, for example "layers.0.mlp.router".
            expert_ids: [T, K] integers, T in the order of the layer's [S, B] tokens. A row of -1 leaves the choice to
                the router, for a token whose routing nobody knows.
            micro_batch: its number.
            num_experts: ids must be below it; None: checked when they are replayed.

        Raises:
            ValueError: not [T, K] integers, an id out of range, a row that is -1 in part, or an expert twice in a row.
        """
        _check_number(micro_batch)
        expert_ids = torch.as_tensor(expert_ids)
        if expert_ids.dim() != 2 or expert_ids.shape[1] < 1 or expert_ids.dtype not in ID_DTYPES:
            raise ValueError(f"Ids of {name} ({list(expert_ids.shape)}, {expert_ids.dtype}) must be [T, K] integers.")
        ids = expert_ids.detach().to(torch.int64)
        limit = 1 << 31 if num_experts is None else num_experts
        is_free = (ids == -1).all(-1, keepdim=True)
        ordered = ids.sort(-1).values
        is_bad = ((ids < 0) & ~is_free) | (ids >= limit)
        is_bad[:, 1:] |= (ordered[:, 1:] == ordered[:, :-1]) & ~is_free
        if is_bad.any():  # sync: checked once, when ids come in
            row = int(is_bad.any(-1).nonzero()[0])
            raise ValueError(
                f"Ids of {name} must be unique, from 0 to {limit - 1} in each row, or all -1; row {row} is"
                f" {ids[row].tolist()}."
            )
        self._ids[name, micro_batch] = ids.to(torch.int32)

    def drop(self, micro_batch: int) -> None:
        """Forget a micro-batch; one without a record is no error."""
        self._ids = {key: ids for key, ids in self._ids.items() if key[1] != micro_batch}

    def to_dense(self, micro_batch: int = 0) -> Tensor:
        """Return ids [T, layers, K] int32 in the order of `layer_names`, the layout of rollout engines.

        Raises:
            ValueError: a layer has no record of this micro-batch, or another T or K than the first one.
        """
        ids = [self.get(name, micro_batch) for name in self.layer_names]
        shapes = [list(layer.shape) for layer in ids]
        if not ids or shapes != shapes[:1] * len(ids):
            raise ValueError(f"Layers of one shape [T, K] are needed to stack them, but there are {shapes}.")
        return torch.stack(ids, dim=1)

    @classmethod
    def from_dense(
        cls, expert_ids: Tensor, layer_names: Sequence[str], micro_batch: int = 0, num_experts: int | None = None
    ) -> RoutingRecords:
        """Return the records of one micro-batch from ids [T, layers, K] (an array or lists will do).

        Layers are named in the order of `layer_names`.

        Raises:
            ValueError: names that are not unique or not one for each layer, or ids that `set` refuses.
        """
        records, names, expert_ids = cls(), list(layer_names), torch.as_tensor(expert_ids)
        if expert_ids.dim() != 3 or len(set(names)) != len(names) or len(names) != expert_ids.shape[1]:
            raise ValueError(
                f"expert_ids ({list(expert_ids.shape)}) must be [T, layers, K] with a name for each layer; there are"
                f" {len(set(names))} different names."
            )
        for name, ids in zip(names, expert_ids.unbind(1), strict=True):
            records.set(name, ids, micro_batch, num_experts)
        return records

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all ids as a safetensors file, which appears under its name only when it is whole.

        Raises:
            ImportError: safetensors is not installed.
            FileNotFoundError: the folder is not there.
        """
        save_file, path = _safetensors().torch.save_file, Path(path)
        tensors = {f"{number}/{name}": ids.cpu().contiguous() for (name, number), ids in self._ids.items()}
        if not path.parent.is_dir():
            raise FileNotFoundError(f"The folder of {path} is not there.")
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            save_file(tensors, written, metadata={"format": FORMAT, "order": json.dumps(list(tensors))})
            os.replace(written, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingRecords:
        """Read what `save` wrote. Nothing in the file is executed.

        Raises:
            ImportError: safetensors is not installed.
            ValueError: the file is not of this kind, or holds ids that `set` refuses.
        """
        safetensors, records = _safetensors(), cls()
        try:
            with safetensors.safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"{path} does not hold routing records ({FORMAT!r}).")
                keys = json.loads(metadata.get("order", "null"))
                if not isinstance(keys, list) or sorted(map(repr, keys)) != sorted(map(repr, file.keys())):
                    raise ValueError(f"{path}: the list of records does not name the tensors that are there.")
                for key in keys:
                    parts = re.fullmatch(r"(0|-?[1-9][0-9]{0,17})/(.*)", key, re.DOTALL)
                    if parts is None:
                        raise ValueError(f"{path}: {key!r} is not MICRO-BATCH/LAYER.")
                    records.set(parts[2], file.get_tensor(key), int(parts[1]))
        except (safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not a whole safetensors file of routing records: {error}.") from error
        return records


@dataclass(frozen=True)
class _Decisions:
    """What routers decided in one block, by layer name, so that a repeated forward decides the same."""

    expert_ids: dict[str, Tensor] = field(default_factory=dict)  # [T, K] int64
    kept_maps: dict[str, Tensor] = field(default_factory=dict)  # [T, E] bool, with capacity or rounding
    uncounted: set[str] = field(default_factory=set)  # chosen under no_grad, where a router counts nothing


class _Recorder(DecisionRecorder):
    """One router's way to the decisions of a block, to its forced ids [T, K], and to the block around it."""

    def __init__(self, name: str, decisions: _Decisions, forced: Tensor | None, outer: DecisionRecorder | None) -> None:
        self.name, self.decisions, self.forced, self.outer = name, decisions, forced, outer
        self.has_free_rows = forced is not None and bool((forced < 0).any())  # sync: once, before anything runs

    def expert_ids(self, logits: Tensor, choose: Callable[[], Tensor]) -> Tensor:
        decided, uncounted = self.decisions.expert_ids, self.decisions.uncounted
        known = decided.get(self.name, self.forced)
        if known is not None and known.shape[0] != logits.shape[0]:
            raise ValueError(
                f"The record of {self.name} has {known.shape[0]} tokens, but {logits.shape[0]} came; a block is one"
                " micro-batch."
            )
        if self.name not in decided:
            decided[self.name] = self._decide(logits, choose)
        elif self.name in uncounted and torch.is_grad_enabled():
            uncounted.discard(self.name)
            choose()  # reentrant checkpoint: only the second forward can count what choosing counts (quantiles)
        return _outside_inference(decided[self.name])

    def _decide(self, logits: Tensor, choose: Callable[[], Tensor]) -> Tensor:
        def choose_and_note() -> Tensor:
            if not torch.is_grad_enabled():
                self.decisions.uncounted.add(self.name)
            return choose()

        if self.forced is None:
            return choose_and_note() if self.outer is None else self.outer.expert_ids(logits, choose_and_note)
        ids = self.forced.to(logits.device, torch.int64)
        if self.has_free_rows:
            with torch.no_grad():  # counts nothing and so communicates nothing: only some ranks may have free rows
                ids = torch.where(ids < 0, choose(), ids)
        if self.outer is not None:
            self.outer.expert_ids(logits, lambda: ids)  # a record around a replay keeps what was replayed
        return ids

    def kept_map(self, compute: Callable[[], Tensor]) -> Tensor:
        kept_maps, outer = self.decisions.kept_maps, self.outer if self.forced is None else None
        if self.name not in kept_maps:
            kept_maps[self.name] = compute() if outer is None else outer.kept_map(compute)
        return _outside_inference(kept_maps[self.name])


def _outside_inference(kept: Tensor) -> Tensor:
    """Return a tensor that autograd takes, also where it was made under inference_mode."""
    return kept.clone() if kept.is_inference() and not torch.is_inference_mode_enabled() else kept


@contextmanager
def _attached(
    model: nn.Module, decisions: _Decisions, forced: dict[str, Tensor], *, is_named: bool = True
) -> Iterator[None]:
    """Put a recorder into every router, and restore what was there; without is_named leave out routers without ids."""
    with ExitStack() as stack:
        for name, router in routers_of(model).items():
            kind = router.config.moe_router_type
            if kind != "topk" and not is_named:
                continue
            if kind != "topk":
                name = name or type(router).__name__
                raise ValueError(f"{name} chooses by {kind!r}, which has no K experts per token; only 'topk' has them.")
            stack.callback(setattr, router, "recorder", router.recorder)
            router.recorder = _Recorder(name, decisions, forced.get(name), router.recorder)
        yield


def _check_number(micro_batch: int) -> None:
    """Raise ValueError unless a micro-batch has a whole number for a name, which a file can hold."""
    if type(micro_batch) is not int or abs(micro_batch) >= 10**18:
        raise ValueError(f"micro_batch ({micro_batch!r}) must be a whole number of at most 18 digits.")


def _safetensors() -> Any:
    """Return the safetensors package with its torch part, or raise an ImportError that says how to install it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('Files of routing records need safetensors: pip install "moe-pipeline[replay]".') from error
    return safetensors


def recompute(module: nn.Module, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Run module(*args, **kwargs), keep the arguments alone, and run it again in backward with the same routing.

    torch.utils.checkpoint does the same without the routing: then a near-tie that falls the other way the second time
    changes the shapes behind the router. Counters advance once either way. A checkpoint inside the module runs again on
    its own: let it be `recompute` too.

    Args:
        module: any module; routers may be anywhere in it. One where experts choose tokens chooses again.
        args, kwargs: what it is called with; what needs a gradient must be in args.
        use_reentrant: which of the two implementations of torch.utils.checkpoint.

    Raises:
        ValueError: module is no nn.Module, in which routers could be found.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module ({type(module).__name__}) must be an nn.Module, in which routers can be found.")
    decisions = _Decisions()

    def run(*inputs: Any) -> Any:
        with _attached(module, decisions, {}, is_named=False):
            return module(*inputs, **kwargs)

    return checkpoint(run, *args, use_reentrant=use_reentrant)
