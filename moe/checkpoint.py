"""Save and load training state: atomically, from any layout of ranks to any other, running nothing a file says.

directory/
  iter_0000050/        appears whole or not at all
    __0_0.distcp ...   the tensors that each rank wrote, by torch.distributed.checkpoint
    .metadata          its pickled index, for other tools; never unpickled here
    index.json         the same index: dtype, shape and chunks of every tensor, a checksum for every chunk
                       and, as in meta.json, for all of itself
    meta.json          format version, step, the caller's `extra`, hyper-parameters of the optimizer
  latest_checkpointed_iteration.txt
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.checkpoint_folders import (
    check_seal,
    find_folder,
    flush_folder,
    folder_name,
    latest_step,
    prune,
    publish,
    read_bounded,
    remove_leftovers,
    sealed,
    whole_steps,
    write_durably,
)
from moe.checkpoint_state import (
    caller_tensors,
    check_options,
    check_targets,
    empty_slots,
    empty_tensors,
    hyper_parameters,
    master_weights,
    model_state,
    named_slots,
    optimizer_state,
    parameter_names,
    restore_options,
    rng_state,
    saved_options,
    set_rng_state,
)
from moe.parallel import all_ranks_succeeded

__all__ = ["LoadedCheckpoint", "latest_step", "load_checkpoint", "save_checkpoint"]

FORMAT_VERSION = 2
# What files, tensors and JSON raise: it must reach the other ranks, or they wait for this one.
_FAILURES = (
    *(OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, MemoryError, ArithmeticError),
    AssertionError,
)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What `load_checkpoint` read besides the tensors."""

    step: int
    extra: dict[str, Any]  # as given to `save_checkpoint`, after a round trip through JSON
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)  # those that all ranks gave, on the host


@dataclass(frozen=True, kw_only=True)
class _Save:
    """All that a save still has to write."""

    folder: Path
    writing: Path
    step: int
    state: dict[str, Tensor]
    meta: str
    keep_last: int


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    keep_last: int = 2,
) -> Path:
    """Write `directory/iter_<step>`, point the latest-iteration file to it, then remove older checkpoints.

    A crash at any moment leaves the previous checkpoint whole and named. A checkpoint of the same step is replaced;
    those of later steps, from a run that was rolled back, are left alone. The states of torch's random generators of
    every rank are saved too.

    Args:
        directory: on a file system that all ranks share; made if need be, used by one job and one save at a time:
            what another save is still writing there is taken for what a crash left.
        step: number of finished optimizer steps.
        model: its `state_dict()` holds tensors alone. DTensors are saved with their global shape, each chunk once;
            a plain tensor must be the same on all ranks, because one rank's copy is saved.
        optimizer: its state holds tensors alone. Hyper-parameters that JSON cannot hold are left out.
        extra: JSON-able; comes back from `load_checkpoint`. One rank's copy is saved.
        tensors: further tensors by name, for example routing records; also come back. A name that several ranks give
            must have the same tensor there: put the rank into the name of what differs.
        keep_last: how many checkpoints of steps up to `step` stay, this one included.

    Returns:
        The folder of the checkpoint, on every rank once it is in place.

    Raises:
        ValueError: bad `step` or `keep_last`; a state that is no tensor, or that a sharded parameter's shape cannot
            place; a parameter of the optimizer that the model does not name; `extra` that is not JSON-able.
        RuntimeError: another rank raised, or writing failed somewhere; on every rank, with that rank's error.

    Collectives: three of all_ranks_succeeded and those of torch.distributed.checkpoint.save, on the default group.
    """
    save = prepare_save(directory, step, model, optimizer, extra=extra, tensors=tensors, keep_last=keep_last)
    finish_save(save)
    return save.folder


def prepare_save(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    extra: dict[str, Any] | None,
    tensors: Mapping[str, Tensor] | None,
    keep_last: int,
    group: dist.ProcessGroup | None = None,
    copy: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> _Save:
    """Collect what `save_checkpoint` saves, see there; without a `copy` it shares memory with model and optimizer.

    Collectives: one of all_ranks_succeeded on the group, by default the default group.
    """
    if step < 0:
        raise ValueError(f"step ({step}) must be at least 0.")
    if keep_last < 1:
        raise ValueError(f"keep_last ({keep_last}) must be at least 1: the new checkpoint itself stays.")
    folder = Path(directory) / folder_name(step)
    writing = folder.with_name(f".writing-{folder.name}")
    with _on_all_ranks(f"preparing {folder}", RuntimeError, group):
        state = copy(model_state(model) | optimizer_state(model, optimizer) | caller_tensors(tensors) | rng_state())
        meta = _meta_json(step, model, optimizer, extra)
        if _is_first_rank():
            remove_leftovers(folder.parent)
            writing.mkdir(parents=True)
    return _Save(folder=folder, writing=writing, step=step, state=state, meta=meta, keep_last=keep_last)


def finish_save(save: _Save, group: dist.ProcessGroup | None = None) -> None:
    """Write what `prepare_save` returned, and publish it once every rank has written.

    Collectives: two of all_ranks_succeeded and those of torch.distributed.checkpoint.save, on the group.
    """
    from moe.checkpoint_storage import write_tensors

    with _on_all_ranks(f"writing {save.folder}", RuntimeError, group):
        index = write_tensors(save.writing, save.state, group)
        if _is_first_rank():
            write_durably(save.writing / "index.json", sealed(json.dumps(index)))
            write_durably(save.writing / "meta.json", sealed(save.meta))
            flush_folder(save.writing)
    with _on_all_ranks(f"publishing {save.folder}", RuntimeError, group):
        if _is_first_rank():
            publish(save.writing, save.folder, save.step)
            prune(save.folder.parent, save.step, save.keep_last)


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
) -> LoadedCheckpoint:
    """Copy a checkpoint into `model` and `optimizer`, whatever layout of ranks wrote it.

    With an optimizer the run goes on: torch's random generators get their saved states, if as many ranks wrote it. The
    optimizer's state is made anew, and its hyper-parameters (lr, betas, ...) are set to the saved values; only
    `foreach`, `fused`, `capturable` and `differentiable` stay as they are.

    Args:
        directory: as given to `save_checkpoint`.
        model: on real devices, with exactly the checkpoint's tensors.
        optimizer: of the saved class, over the same parameters; groups may be cut otherwise if the options saved
            for a group's parameters are the same. Without an optimizer, saved state is left.
        step: which checkpoint; by default the one that the latest-iteration file names.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: keys, shapes or dtypes differ, or a file is damaged; for a damaged file the message names it and
            the newest other whole checkpoint. Nothing was copied, unless it says "half loaded".

    Collectives: two of all_ranks_succeeded and those of torch.distributed.checkpoint.load, on the default group.
    """
    from moe.checkpoint_storage import open_index, read_tensors

    with _on_all_ranks(f"loading from {directory}", ValueError):
        folder = find_folder(Path(directory), latest_step(directory) if step is None else step)
        with _offering_another(folder):
            meta = _read_meta(folder)
            index = open_index(folder)
        targets, slots, saved = model_state(model), {}, index.tensors
        targets |= empty_tensors(saved, is_resumed=optimizer is not None)
        is_left = ("rng.",) if optimizer is not None else ("rng.", "optimizer.")
        saved = {name: entry for name, entry in saved.items() if name in targets or not name.startswith(is_left)}
        if optimizer is not None:
            names = parameter_names(model, optimizer)
            options = saved_options(folder, meta["optimizer"], names, optimizer)
            slots = empty_slots(names, optimizer, saved)
            targets |= named_slots(names, slots) | master_weights(names, optimizer)
        check_targets(folder, saved, targets)
    with _on_all_ranks(f"loading {folder}", ValueError):
        with _offering_another(folder, "model is half loaded. "):
            read_tensors(folder, index, targets)
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(slots)
            restore_options(optimizer, options)
            set_rng_state(targets)
    tensors = {name.removeprefix("tensors."): t for name, t in targets.items() if name.startswith("tensors.")}
    return LoadedCheckpoint(step=meta["step"], extra=meta["extra"], path=folder, tensors=tensors)


@contextmanager
def _on_all_ranks(action: str, failure: type[Exception], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank, and raise on all of them where it failed on one."""
    error: BaseException | None = None
    try:
        yield
    except _FAILURES as caught:
        error = caught
    texts = all_ranks_succeeded(error, group)
    if isinstance(error, ValueError | FileNotFoundError):
        raise error
    if error is not None or any(texts):
        causes = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        raise failure(f"{action} failed on {len(causes)} of {len(texts)} ranks. {''.join(causes[:1])}") from error


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meta_json(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None
) -> str:
    meta = {
        "format_version": FORMAT_VERSION,
        "torch_version": str(torch.__version__),
        "step": step,
        "extra": extra or {},
        "optimizer": None if optimizer is None else hyper_parameters(model, optimizer),
    }
    try:
        return json.dumps(meta, indent=1)
    except TypeError as error:
        raise ValueError(f"extra must hold what JSON can hold: {error}.") from error


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / "meta.json"
    try:
        content = read_bounded(file)
        meta = json.loads(content)
        version = meta["format_version"]
        if version == FORMAT_VERSION:
            check_seal(content)
            check_options(meta["optimizer"])
            if type(meta["step"]) is not int or not isinstance(meta["extra"], dict):
                raise ValueError("step must be a whole number and extra an object")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format_version {version!s:.40}, and this release reads {FORMAT_VERSION}: use its own."
        )
    return meta


@contextmanager
def _offering_another(folder: Path, consequence: str = "") -> Iterator[None]:
    """Add the newest other whole checkpoint to a ValueError of the block."""
    try:
        yield
    except ValueError as error:
        others = [step for step in reversed(whole_steps(folder.parent)) if folder.name != folder_name(step)]
        step = next((step for step in others if _is_whole(folder.with_name(folder_name(step)))), None)
        way_out = "no other whole checkpoint is there" if step is None else f"the newest other whole one is step={step}"
        raise ValueError(f"{error} {consequence}In {folder.parent}, {way_out}.") from error


def _is_whole(folder: Path) -> bool:
    from moe.checkpoint_storage import open_index

    try:
        _read_meta(folder)
        open_index(folder)
    except ValueError:
        return False
    return True
