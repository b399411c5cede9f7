"""The tensors of one checkpoint folder: written and read by torch.distributed.checkpoint, indexed in JSON.

torch.distributed.checkpoint keeps its index in `.metadata`, a pickle, which runs whatever it names when it is read.
Here the index is `index.json`; `.metadata` stays for other tools and is only compared with its checksum. What is
unpickled is single tensors, by torch.load(weights_only=True), after their checksum was compared.
"""

import io
import math
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moe.checkpoint_json import read_json, regular_size

_INDEX, _PICKLED_INDEX = "index.json", ".metadata"
_FILE_NAME = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata")
_ZIP_START = b"PK\x03\x04"
# What the JSON index or torch.load raise on bytes that are not what they should be.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
_UNREADABLE = (*_MALFORMED, OSError, EOFError, MemoryError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile)


class _Place(NamedTuple):
    """Where the bytes of one chunk are."""

    file: str
    start: int
    num_bytes: int
    crc32: int


class Index(NamedTuple):
    """What `index.json` says, checked."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, _Place]


class _ChecksumWriter(FileSystemWriter):
    """Adds to each chunk that this rank wrote the checksum of its bytes; it travels to rank 0 with their place."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for result in written.wait():
            place = result.storage_data
            with (Path(self.path) / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                place.crc32 = zlib.crc32(stream.read(place.length))
        return written


class _CheckedReader(FileSystemReader):
    """Reads tensors by an index that was checked before, and nothing else."""

    def __init__(self, folder: Path, index: Index) -> None:
        super().__init__(folder)
        self.folder = folder
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(state_dict_metadata=dict(self.index.tensors), storage_data=self.index.places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            tensor = self._read_chunk(item.storage_index)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_chunk(self, chunk: MetadataIndex) -> Tensor:
        place = self.index.places[chunk]
        entry = self.index.tensors[chunk.fqn]
        sizes = next(box.sizes for box in entry.chunks if box.offsets == chunk.offset)
        try:
            with (self.folder / place.file).open("rb") as stream:
                stream.seek(place.start)
                content = stream.read(place.num_bytes)
            if zlib.crc32(content) != place.crc32:
                raise ValueError("checksum differs")
            # Other containers that torch.load knows are older and less guarded.
            if not content.startswith(_ZIP_START):
                raise ValueError("not a zip archive")
            _check_archive(content, math.prod(sizes) * entry.properties.dtype.itemsize)
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) != (entry.properties.dtype, sizes):
                raise ValueError("not the tensor of the index")
        except _UNREADABLE as error:
            # torch.load advises weights_only=False, which must not reach the user.
            reason = error if type(error) in (ValueError, OSError) else type(error).__name__
            raise ValueError(
                f"{self.folder / place.file} is damaged: {place.num_bytes} bytes at {place.start} do not hold "
                f"{chunk.fqn} ({reason})."
            ) from error
        return tensor


def write_tensors(folder: Path, state: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Write every tensor of `state` under `folder` and return the content of `index.json`.

    Raises:
        RuntimeError: on every rank, naming each rank that failed.
        ValueError: this rank does not see every file that was written.

    Collectives: those of torch.distributed.checkpoint.save on the group, by default the default group.
    """
    with _without_group_warning(), _rank_errors(RuntimeError):
        metadata = save(
            dict(state),
            storage_writer=_ChecksumWriter(folder, sync_files=True, overwrite=False),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        chunks = [(box, metadata.storage_data[MetadataIndex(name, box.offsets)]) for box in entry.chunks]
        tensors[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [
                [list(box.offsets), list(box.sizes), [place.relative_path, place.offset, place.length, place.crc32]]
                for box, place in chunks
            ],
        }
    names = sorted({place.relative_path for place in metadata.storage_data.values()} | {_PICKLED_INDEX})
    if unseen := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / unseen[0]} was written by another rank and is not seen here: share the directory.")
    return {
        "files": {name: (folder / name).stat().st_size for name in names},
        "metadata_crc32": zlib.crc32((folder / _PICKLED_INDEX).read_bytes()),
        "tensors": tensors,
    }


def open_index(folder: Path) -> Index:
    """Return the checked index of a checkpoint, after comparing the size of every file with it.

    Raises:
        ValueError: the index or a file is missing, damaged or truncated; the message names it.
    """
    file = folder / _INDEX
    content = read_json(file)
    try:
        index = _parse(content)
        checksum = content["metadata_crc32"]
    except (*_MALFORMED, MemoryError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    for name, num_bytes in content["files"].items():
        data = folder / name
        try:
            found = regular_size(data)
        except (OSError, ValueError) as error:
            raise ValueError(f"{data} is damaged: {type(error).__name__}: {error}.") from error
        if found != num_bytes:
            raise ValueError(f"{data} is damaged: it has {found} bytes, and its index says {num_bytes}.")
    # Only a listed file is known to be a regular one.
    if _PICKLED_INDEX not in content["files"] or zlib.crc32((folder / _PICKLED_INDEX).read_bytes()) != checksum:
        raise ValueError(f"{folder / _PICKLED_INDEX} is damaged: checksum differs.")
    return index


def read_tensors(folder: Path, index: Index, targets: dict[str, Tensor]) -> None:
    """Copy the checkpoint's values into `targets`, whose names, shapes and dtypes were compared with `index` before.

    Raises:
        ValueError: on every rank, naming the file that is damaged; some targets may have been overwritten.

    Collectives: those of torch.distributed.checkpoint.load on the default group.
    """
    with _without_group_warning(), _rank_errors(ValueError):
        load(
            dict(targets),
            storage_reader=_CheckedReader(folder, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )


def _parse(content: dict[str, Any]) -> Index:
    files: dict[str, int] = content["files"]
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no file name of a checkpoint")
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _Place] = {}
    for name, entry in content["tensors"].items():
        dtype, shape = vars(torch)[entry["dtype"]], torch.Size(entry["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
        boxes = []
        for offsets, sizes, place in entry["chunks"]:
            box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            key = MetadataIndex(name, box.offsets)
            if key in places:
                raise ValueError(f"{name} has two chunks at {offsets}")
            boxes.append(box)
            places[key] = _parse_place(place, files)
            if math.prod(box.sizes) * dtype.itemsize > places[key].num_bytes:
                raise ValueError(f"a chunk of {name} {list(sizes)} has {places[key].num_bytes} bytes")
        _check_cover(name, shape, boxes)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), shape, boxes)
    return Index(tensors, places)


def _parse_place(fields: list[Any], files: dict[str, int]) -> _Place:
    place = _Place(*fields)
    if not 0 <= place.start <= place.start + place.num_bytes <= files[place.file]:
        raise ValueError(f"a chunk lies at {place.start} + {place.num_bytes} of {place.file}")
    return place


def _check_cover(name: str, shape: torch.Size, boxes: list[ChunkStorageMetadata]) -> None:
    """Raise unless the chunks lie inside the tensor, are disjoint and hold as many elements as it has."""
    for box in boxes:
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            if not (0 <= offset <= extent and 0 <= size <= extent - offset):
                raise ValueError(f"a chunk of {name} {list(shape)} lies at {list(box.offsets)} + {list(box.sizes)}")
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not cover its shape {list(shape)}")
    if len(boxes) > 1 and len(shape) > 0:
        starts = torch.tensor([box.offsets for box in boxes])  # [n, d]
        ends = starts + torch.tensor([box.sizes for box in boxes])
        shared = (torch.maximum(starts[:, None], starts) < torch.minimum(ends[:, None], ends)).all(-1)  # [n, n]
        if int(shared.sum()) > int(shared.diagonal().sum()):
            raise ValueError(f"chunks of {name} overlap")


def _check_archive(content: bytes, num_bytes: int) -> None:
    """Raise unless a zip archive holds one tensor of `num_bytes`, nothing compressed and little besides."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size for entry in entries):
        raise ValueError("an entry is compressed")
    if sum(entry.file_size for entry in entries) > len(content):
        raise ValueError("entries overlap")
    data = [entry.file_size for entry in entries if entry.filename.split("/")[-2:-1] == ["data"]]
    if data != [num_bytes]:
        raise ValueError(f"its data has {data} bytes, and the tensor {num_bytes}")


@contextmanager
def _rank_errors(failure: type[Exception]) -> Iterator[None]:
    """Turn torch.distributed.checkpoint's exception, which is no Exception, into `failure` with the ranks' errors."""
    try:
        yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise failure("; ".join(causes[:4])) from error


@contextmanager
def _without_group_warning() -> Iterator[None]:
    if dist.is_initialized():  # filters belong to all threads, and an asynchronous save has one of its own
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
