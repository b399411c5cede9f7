"""Record and replay of routing decisions, by layer name and micro-batch; recomputation that keeps its decisions."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from router.router import DecisionRecorder
from router.step import routers_of

FORMAT = "moe-pipeline routing records, version 1"


class RoutingRecords:
    """The expert ids that routers chose, [T, K] for each layer and micro-batch.

    Layers go by their name in the model that is recorded or replayed, so a dense layer between two MoE layers shifts
    nothing. Only ids are kept and forced; weights are computed from the router's own logits, with their gradient.

    One `record` or `replay` block is one micro-batch, forward and backward: a router that runs again inside it repeats
    a forward (recomputation) and gets the same decision again. So a module that is called twice in one forward, with
    different tokens, cannot be recorded.

    Example:
        records = RoutingRecords()
        with records.record(model, micro_batch=0):
            model(tokens).backward()
        records.save("routes.safetensors")
        with RoutingRecords.load("routes.safetensors").replay(other_model, micro_batch=0):
            other_model(tokens).backward()
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], Tensor] = {}
        self._with_free_rows: set[tuple[str, int]] = set()
        self._kept_maps: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def record(self, model: nn.Module, micro_batch: int = 0) -> Iterator[RoutingRecords]:
        """Keep what every router of the model decides inside the block.

        Args:
            model: its training or evaluation goes on as without recording.
            micro_batch: a number of your choice that has no record yet.

        Raises:
            ValueError: the micro-batch has a record, or a router's decision is not K experts per token.
        """
        if micro_batch in self.micro_batches:
            raise ValueError(
                f"micro_batch ({micro_batch}) is recorded already ({self!r}); take another number or `drop` it."
            )
        with self._attached(model, micro_batch):
            yield self

    @contextmanager
    def replay(self, model: nn.Module, micro_batch: int = 0) -> Iterator[RoutingRecords]:
        """Let every router of the model take the ids that are recorded for it.

        Raises:
            ValueError: the routers of the model are not the layers recorded for this micro-batch, or ids are out of
                their range; inside the block, if the number of tokens or K differs from the record.
        """
        routers, recorded = routers_of(model), {name for name, number in self._ids if number == micro_batch}
        if set(routers) != recorded:
            raise ValueError(
                f"micro_batch ({micro_batch}) of {self!r} does not fit the model: without a record"
                f" {sorted(set(routers) - recorded)}, without a router {sorted(recorded - set(routers))}."
            )
        for name, router in routers.items():
            ids = self._ids[name, micro_batch]
            if ids.numel() and int(ids.max()) >= router.num_experts:  # sync: checked before anything runs
                raise ValueError(
                    f"The record of {name} names expert {int(ids.max())}, but its router has {router.num_experts}."
                )
        with self._attached(model, micro_batch, is_replay=True):
            yield self

    @contextmanager
    def _attached(self, model: nn.Module, micro_batch: int, *, is_replay: bool = False) -> Iterator[None]:
        """Put a recorder into every router, and restore what was there."""
        with ExitStack() as stack:
            for name, router in routers_of(model).items():
                if router.config.moe_router_type != "topk":
                    raise ValueError(
                        f"{name or type(router).__name__} chooses by {router.config.moe_router_type!r}, which has no K"
                        " experts per token to record; only moe_router_type 'topk' has."
                    )
                maps = {} if is_replay else self._kept_maps
                recorder = _Recorder(self, maps, (name, micro_batch), router.recorder)
                stack.callback(setattr, router, "recorder", router.recorder)
                router.recorder = recorder
            yield

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers that have a record, in the order in which they came."""
        return tuple(dict.fromkeys(name for name, _ in self._ids))

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batches that have a record, in the order in which they came."""
        return tuple(dict.fromkeys(number for _, number in self._ids))

    def __len__(self) -> int:
        """Return the number of records, one for each layer and micro-batch."""
        return len(self._ids)

    def __repr__(self) -> str:
        """Show how much is recorded."""
        return f"RoutingRecords(layers={len(self.layer_names)}, micro_batches={list(self.micro_batches)})"

    def get(self, name: str, micro_batch: int = 0) -> Tensor:
        """Return the ids [T, K] int32 of a layer and micro-batch.

        Raises:
            ValueError: there is no such record.
        """
        if (name, micro_batch) not in self._ids:
            raise ValueError(f"There is no record of {name!r}, micro-batch {micro_batch}, in {self!r}.")
        return self._ids[name, micro_batch]

    def set(self, name: str, expert_ids: Tensor, micro_batch: int = 0) -> None:
        """Put ids in, for example those of a rollout engine.

        Args:
            name: the router's name in the model, for example "layers.0.mlp.router".
            expert_ids: [T, K] integers, T in the order of the layer's [S, B] tokens. A row of -1 leaves the choice to
                the router, for a token whose routing nobody knows.
            micro_batch: its number.

        Raises:
            ValueError: not [T, K] integers, an id below -1, a row that is -1 in part, or an expert twice in a row.
        """
        if expert_ids.dim() != 2 or expert_ids.is_floating_point() or expert_ids.dtype == torch.bool:
            raise ValueError(f"Ids of {name} ({list(expert_ids.shape)}, {expert_ids.dtype}) must be [T, K] integers.")
        ids = expert_ids.detach().to(torch.int64)
        is_free = (ids == -1).all(-1, keepdim=True)
        ordered = ids.sort(-1).values
        is_bad = ((ids < 0) & ~is_free) | (ids >= 1 << 31)
        is_bad[:, 1:] |= (ordered[:, 1:] == ordered[:, :-1]) & ~is_free
        if is_bad.any():  # sync: checked once, when ids come in
            row = int(is_bad.any(-1).nonzero()[0])
            raise ValueError(
                f"Ids of {name} must be unique and not negative in each row, or all -1; row {row} is"
                f" {ids[row].tolist()}."
            )
        self._with_free_rows.discard((name, micro_batch))
        if is_free.any():  # sync: checked once, when ids come in
            self._with_free_rows.add((name, micro_batch))
        self._ids[name, micro_batch] = ids.to(torch.int32)

    def drop(self, micro_batch: int) -> None:
        """Forget a micro-batch; one without a record is no error."""
        for table in (self._ids, self._kept_maps):
            for key in [key for key in table if key[1] == micro_batch]:
                del table[key]
        self._with_free_rows = {key for key in self._with_free_rows if key[1] != micro_batch}

    def to_dense(self, micro_batch: int = 0) -> Tensor:
        """Return ids [T, layers, K] int32 in the order of `layer_names`, the layout of rollout engines.

        Raises:
            ValueError: a layer has no record of this micro-batch, or another T or K than the first one.
        """
        ids = [self.get(name, micro_batch) for name in self.layer_names]
        if not ids or any(layer.shape != ids[0].shape for layer in ids):
            shapes = [list(layer.shape) for layer in ids]
            raise ValueError(f"Layers of one shape [T, K] are needed to stack them, but there are {shapes}.")
        return torch.stack(ids, dim=1)

    @classmethod
    def from_dense(cls, expert_ids: Tensor, layer_names: Sequence[str], micro_batch: int = 0) -> RoutingRecords:
        """Return the records of one micro-batch from ids [T, layers, K]; see `set` for what they must be.

        Args:
            expert_ids: [T, layers, K] integers.
            layer_names: the routers' names, one for each layer.
            micro_batch: its number.

        Raises:
            ValueError: names that are not unique or not one for each layer, or ids that `set` refuses.
        """
        names = list(layer_names)
        if expert_ids.dim() != 3 or len(set(names)) != len(names) or len(names) != expert_ids.shape[1]:
            raise ValueError(
                f"expert_ids ({list(expert_ids.shape)}) must be [T, layers, K] with a name for each layer; there are"
                f" {len(set(names))} different names."
            )
        records = cls()
        for name, ids in zip(names, expert_ids.unbind(1), strict=True):
            records.set(name, ids, micro_batch)
        return records

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all ids as a safetensors file, which appears under its name only when it is whole.

        Raises:
            ImportError: safetensors is not installed.
        """
        save_file = _safetensors().torch.save_file
        keys = [f"{number}/{name}" for name, number in self._ids]
        tensors = {key: ids.cpu().contiguous() for key, ids in zip(keys, self._ids.values(), strict=True)}
        path = Path(path)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            save_file(tensors, Path(folder) / path.name, metadata={"format": FORMAT, "order": json.dumps(keys)})
            os.replace(Path(folder) / path.name, path)

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
                if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(file.keys()):
                    raise ValueError(f"{path}: the list of records does not name the tensors that are there.")
                for key in keys:
                    number, slash, name = key.partition("/")
                    if not slash or not number.lstrip("-").isdecimal():
                        raise ValueError(f"{path}: {key!r} is not MICRO-BATCH/LAYER.")
                    records.set(name, file.get_tensor(key), int(number))
        except (safetensors.SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a whole safetensors file of routing records: {error}.") from error
        return records


class _Recorder(DecisionRecorder):
    """One router's way to the records of one micro-batch."""

    def __init__(
        self,
        records: RoutingRecords,
        kept_maps: dict[tuple[str, int], Tensor],
        key: tuple[str, int],
        outer: DecisionRecorder | None,
    ) -> None:
        self.records, self.kept_maps, self.key, self.outer = records, kept_maps, key, outer

    def expert_ids(self, logits: Tensor, choose: Callable[[], Tensor]) -> Tensor:
        table = self.records._ids
        if self.key not in table:
            chosen = choose() if self.outer is None else self.outer.expert_ids(logits, choose)
            table[self.key] = chosen.detach().to(torch.int32)
            return chosen
        ids = table[self.key]
        if ids.shape[0] != logits.shape[0]:
            name, number = self.key
            raise ValueError(
                f"The record of {name}, micro-batch {number}, has {ids.shape[0]} tokens, but {logits.shape[0]} came."
            )
        ids = ids.to(logits.device, torch.int64)
        return torch.where(ids < 0, choose(), ids) if self.key in self.records._with_free_rows else ids

    def kept_map(self, compute: Callable[[], Tensor]) -> Tensor:
        if self.key not in self.kept_maps:
            self.kept_maps[self.key] = compute() if self.outer is None else self.outer.kept_map(compute)
        return self.kept_maps[self.key]


def _safetensors() -> Any:
    """Return the safetensors package with its torch part.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError('Files of routing records need safetensors: pip install "moe-pipeline[replay]".') from error
    return safetensors


def recompute(module: nn.Module, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Run module(*args, **kwargs), keep the arguments alone, and run it again in backward with the same routing.

    torch.utils.checkpoint does the same without the routing: then a near-tie that falls the other way the second time
    changes the shapes behind the router. Counters advance once either way.

    Args:
        module: any module; routers may be anywhere in it.
        args: what it is called with; those that need a gradient must be here.
        use_reentrant: which of the two implementations of torch.utils.checkpoint.
        kwargs: further arguments of the module.

    Returns:
        What the module returns.
    """
    records = RoutingRecords()

    def run(*inputs: Any) -> Any:
        with records._attached(module, 0):
            return module(*inputs, **kwargs)

    return checkpoint(run, *args, use_reentrant=use_reentrant)
