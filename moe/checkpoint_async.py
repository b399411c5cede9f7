"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.checkpoint import finish_save, prepare_save


class AsyncCheckpointer:
    """Saves as `save_checkpoint` does, from a copy on the host, in a thread of each rank.

        with AsyncCheckpointer() as checkpointer:
            for step in range(1, num_steps + 1):
                ...
                if step % 100 == 0:
                    checkpointer.save(directory, step, model, optimizer)  # returns once the copy is made

    The threads talk over a gloo group of their own, so collectives of the training are never mixed up with theirs. A
    checkpoint appears under its name as soon as every rank has written its part. One save is under way at a time: the
    next one waits for it, and `wait` and leaving the block do. What goes wrong in a thread is raised there, on every
    rank. A process that ends otherwise leaves the checkpoint before, whole and named.

    The copy takes the memory of what a rank saves, once; it is kept for the next save.

    Args:
        timeout: of a collective of the threads; None: that of gloo, 30 minutes.

    Collectives: creates a gloo group of all ranks; every rank takes part.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._stager: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: dict[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        keep_last: int = 2,
    ) -> Path:
        """Copy the state to the host, begin to write it, and return the folder that it will have.

        Args, Raises: as `save_checkpoint`; also what went wrong with the save before; ValueError after `close`.

        Collectives: one of all_ranks_succeeded, over the group of the threads, after the save before has ended.
        """
        self.wait()
        if self._is_closed:
            raise ValueError("this AsyncCheckpointer is closed; make another one.")
        options: dict[str, Any] = {"extra": extra, "tensors": tensors, "keep_last": keep_last}
        save = prepare_save(directory, step, model, optimizer, **options, group=self._group, copy=self._copy)

        def write() -> None:
            try:
                finish_save(save, self._group)
            except BaseException as error:  # noqa: BLE001  # whatever ends a thread is raised by `wait`
                self._error = error

        # A daemon: a process that was told to end does not wait for peers that may be dead.
        self._thread = threading.Thread(target=write, name=f"save step {step}", daemon=True)
        self._thread.start()
        return save.folder

    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy on the host, in the memory of the copy before where there was one."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            options = StagingOptions(
                use_pinned_memory=any(tensor.is_cuda for tensor in state.values()),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)
        copy: dict[str, Tensor] = self._stager.stage(state)
        return copy

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            RuntimeError, ValueError: the save failed; as `save_checkpoint` would have raised it.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the copy and the group back. Raises as `wait`."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            if self._stager is not None:
                self._stager.close()
                self._stager = None
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close after a block that ended well; else leave the thread alone, for its peers may be dead."""
        if error is None:
            self.close()
