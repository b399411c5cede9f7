"""A model's whole tensors as safetensors files, for other tools, and back into any layout of ranks.

directory/
  model.safetensors                       or, above max_shard_bytes:
  model-00001-of-00002.safetensors ...
  model.safetensors.index.json            Hugging Face's index: the file of every tensor

A file is the length of its header in 8 bytes, the header in JSON (dtype, shape and place of every tensor), and the
tensors' bytes. It has no checksum: that its header fits its length is checked, a changed value is not seen.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.checkpoint import _is_first_rank, _on_all_ranks
from moe.checkpoint_folders import flush_folder, write_durably
from moe.checkpoint_state import model_state
from moe.parallel import local_box, local_tensor

_SINGLE, _INDEX, _WRITING = "model.safetensors", "model.safetensors.index.json", ".writing-safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_MAX_INDEX_BYTES = 1 << 28
_NUM_LISTED = 10
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(NamedTuple):
    """What a file's header says of a tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def export_safetensors(
    model: nn.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write the model's whole tensors, parameters and buffers, under the names of `model.state_dict()`.

    Every file appears under its name when it is whole, the index last. A rank holds two whole tensors at most. What a
    crash leaves is removed by the next export.

    Args:
        model: its `state_dict()` holds tensors alone. DTensors are gathered; a plain tensor must be the same on all
            ranks, because rank 0's is written.
        directory: made if need be; rank 0 writes to it.
        max_shard_bytes: a file ends before the tensor that would exceed it; a larger tensor has a file of its own.

    Raises:
        ValueError: max_shard_bytes below 1; a tensor on the meta device or of a dtype that the format has not; a
            directory that already holds an export.
        RuntimeError: writing failed; on every rank.

    Collectives: all_ranks_succeeded twice and once a file, on the default group; one gather of each DTensor.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes ({max_shard_bytes}) must be at least 1.")
    folder = Path(directory)
    writing = folder / _WRITING
    with _on_all_ranks(f"preparing {folder}", ValueError):
        shards = _shards(_state(model), max_shard_bytes)
        if _is_first_rank():
            if taken := [name for name in (_SINGLE, _INDEX) if (folder / name).exists()]:
                raise ValueError(
                    f"{folder / taken[0]} is there already: remove that export, or name another directory."
                )
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
    for name, shard in shards.items():
        with _on_all_ranks(f"writing {folder / name}", RuntimeError):
            wholes = map(_whole, shard.values())
            try:
                if _is_first_rank():
                    _write_file(writing / name, shard, wholes)
            finally:
                for _ in wholes:  # the other ranks wait in each gather, also where writing has failed
                    pass
    with _on_all_ranks(f"publishing {folder}", RuntimeError):
        if _is_first_rank():
            names = list(shards)
            if len(shards) > 1:
                write_durably(writing / _INDEX, json.dumps(_index(shards), indent=2))
                names.append(_INDEX)
            for name in names:
                os.replace(writing / name, folder / name)
            flush_folder(folder)
            writing.rmdir()


def import_safetensors(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Copy what `export_safetensors` wrote into a model of any layout. Each rank reads its own parts alone.

    Quantized weights are copied as they are: make `MasterWeights` afterwards. Nothing in a file is executed.

    Args:
        model: on real devices, with exactly the exported names, shapes and dtypes.
        directory: on a file system that all ranks see.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: there is no export.
        ValueError: keys, shapes or dtypes differ, or a file is damaged; on every rank. Nothing was copied, unless it
            says "half loaded".

    Collectives: two of all_ranks_succeeded, on the default group.
    """
    _safetensors()
    folder = Path(directory)
    with _on_all_ranks(f"reading {folder}", ValueError):
        state = _state(model)
        entries = _read_headers(folder)
        _check_fit(folder, entries, state)
    with _on_all_ranks(f"importing {folder}", ValueError):
        for file in sorted({entry.file for entry in entries.values()}):
            _copy_file(folder / file, {name: state[name] for name, entry in entries.items() if entry.file == file})


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors by name; they share memory with the model."""
    return {name.removeprefix("model."): tensor.detach() for name, tensor in model_state(model).items()}


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _shards(state: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file, wide ones first so that all are aligned to their width."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}, and safetensors files hold {', '.join(_NAMES.values())} alone."
            )
        if shards[-1] and size + _num_bytes(tensor) > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _num_bytes(tensor)
    ordered = [dict(sorted(shard.items(), key=lambda item: -item[1].itemsize)) for shard in shards]
    if len(ordered) == 1:
        return {_SINGLE: ordered[0]}
    return {f"model-{i:05d}-of-{len(ordered):05d}.safetensors": shard for i, shard in enumerate(ordered, 1)}


def _index(shards: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    files = {name: file for file, shard in shards.items() for name in shard}
    total = sum(_num_bytes(tensor) for shard in shards.values() for tensor in shard.values())
    return {"metadata": {"total_size": total}, "weight_map": files}


def _whole(tensor: Any) -> Tensor:
    """Return a DTensor's global tensor, a plain tensor as it is. Collectives: DTensor's own."""
    if not hasattr(tensor, "full_tensor"):
        plain: Tensor = tensor
        return plain
    if tensor.itemsize > 1:
        whole: Tensor = tensor.full_tensor()
        return whole
    from torch.distributed.tensor import DTensor

    codes = DTensor.from_local(  # gloo sends no FP8
        tensor.to_local().view(torch.uint8),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return codes.full_tensor().view(tensor.dtype)


def _write_file(file: Path, layout: Mapping[str, Tensor], wholes: Iterable[Tensor]) -> None:
    """Write the header of `layout`, and then the tensors as they come."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in layout.items():
        start, end = end, end + _num_bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for whole in wholes:
            values = whole.cpu().contiguous()  # sync: to the file
            if values.numel() > 0:
                stream.write(memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr())))
        stream.flush()
        os.fsync(stream.fileno())


def _read_headers(folder: Path) -> dict[str, _Entry]:
    """Return the entries of all tensors by name, after comparing the files with the index.

    Raises:
        FileNotFoundError: there is neither an index nor a single file.
        ValueError: a file is missing or damaged, or holds other tensors than the index says.
    """
    files = None
    if (folder / _INDEX).exists():
        files = _read_index(folder / _INDEX)
    elif not (folder / _SINGLE).exists():
        raise FileNotFoundError(f"no export in {folder}: looked for {_SINGLE} and {_INDEX}.")
    entries: dict[str, _Entry] = {}
    for file in [_SINGLE] if files is None else sorted(set(files.values())):
        with _opened(folder / file) as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                if files is not None and files.get(name) != file:
                    raise ValueError(f"{folder / file} is damaged: it holds {name}, and {_INDEX} does not say so.")
                entries[name] = _Entry(file, part.get_dtype(), tuple(part.get_shape()))
    if files is not None and (absent := sorted(files.keys() - entries.keys())):
        raise ValueError(
            f"{folder / files[absent[0]]} is damaged: {_INDEX} says it holds {absent[0]}, and it does not."
        )
    return entries


def _read_index(file: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"it is no file of at most {_MAX_INDEX_BYTES} bytes")
        files = json.loads(file.read_bytes())["weight_map"]
        for name in set(files.values()):
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no file name of an export")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    return dict(files)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file, whose header safetensors checks; what it raises becomes a ValueError."""
    safetensors = _safetensors()
    try:
        if not file.is_file():
            raise OSError("no such file")
        with safetensors.safe_open(os.fspath(file), framework="pt") as opened:
            yield opened
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}.") from error


def _check_fit(folder: Path, entries: Mapping[str, _Entry], state: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that lists every tensor that is missing, unexpected, or of another shape or dtype."""
    differing = [
        f"{name} ({entries[name].file}: {entries[name].dtype} {list(entries[name].shape)},"
        f" here: {_NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)})"
        for name, tensor in state.items()
        if name in entries
        and (_DTYPES.get(entries[name].dtype), entries[name].shape) != (tensor.dtype, tuple(tensor.shape))
    ]
    faults = {
        "missing in the files": state.keys() - entries.keys(),
        "unexpected in the files": {f"{name} ({entries[name].file})" for name in entries.keys() - state.keys()},
        "differing in dtype or shape": set(differing),
    }
    parts = []
    for fault, names in faults.items():
        if names:
            more = ", ..." if len(names) > _NUM_LISTED else ""
            parts.append(f"{len(names)} {fault}: {', '.join(sorted(names)[:_NUM_LISTED])}{more}")
    if parts:
        raise ValueError(f"{folder} does not fit the model: build it with the exported config. {'; '.join(parts)}.")


@torch.no_grad()
def _copy_file(file: Path, targets: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of each tensor; the file's header was compared with the targets before."""
    name = ""
    try:
        with _opened(file) as opened:
            for name, target in targets.items():
                local, box = local_tensor(target), local_box(target)
                if local.numel() > 0:
                    local.copy_(opened.get_slice(name)[box] if box else opened.get_tensor(name))
    except ValueError as error:
        raise ValueError(f"{error} It happened at {name}, and model is half loaded.") from error


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError('import_safetensors needs safetensors: pip install "moe-pipeline[export]".') from error
    return safetensors
