"""The tensors of one checkpoint folder: written and read by torch.distributed.checkpoint, indexed in JSON.

torch.distributed.checkpoint keeps its index in `.metadata`, a pickle, which runs whatever it names when it is read.
Here the index is `index.json`; `.metadata` stays for other tools and is only compared with its checksum. A chunk is an
archive as torch.save makes it, and the index says where in it the bytes of the tensor lie: no archive is opened here,
and nothing is unpickled or unpacked.
"""

import io
import itertools
import json
import math
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

from moe.checkpoint_folders import check_seal, is_regular, read_bounded

_INDEX, _PICKLED_INDEX = "index.json", ".metadata"
_FILE_NAME = re.compile(r"__[0-9]+_[0-9]+\.distcp|\.metadata")
_MAX_ARCHIVE_BYTES = 1 << 16  # of a chunk besides its tensor: names, places, a pickle of a few hundred bytes
# What the JSON index or a tensor's bytes raise where they are not what they should be.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
_UNREADABLE = (*_MALFORMED, OSError, MemoryError)


class _Place(NamedTuple):
    """Where the bytes of one chunk are."""

    file: str
    start: int
    num_bytes: int
    crc32: int
    data_start: int  # of the tensor's bytes, row-major, within these


class Index(NamedTuple):
    """What `index.json` says, checked."""

    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, _Place]


class _RowMajorPlanner(DefaultSavePlanner):
    """Writes transposed tensors row-major, as the index expects all of them."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.contiguous() if isinstance(found, Tensor) else found


class _ChecksumWriter(FileSystemWriter):
    """Adds to each chunk that this rank wrote its checksum and the tensor's place; they travel to rank 0."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        for result in written.wait():
            place = result.storage_data
            with (Path(self.path) / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                content = stream.read(place.length)
            place.crc32 = zlib.crc32(content)
            place.data_start = _data_start(content)
        return written


def _data_start(content: bytes) -> int:
    """Return where in an archive of torch.save the bytes of its only storage begin."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        header = next(info.header_offset for info in archive.infolist() if info.filename.endswith("/data/0"))
    # A local header has 30 bytes, the last four of which are the lengths of the name and of the field behind it.
    return header + 30 + sum(struct.unpack_from("<HH", content, header + 26))


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
        dtype = entry.properties.dtype
        try:
            content = bytearray(place.num_bytes)
            with (self.folder / place.file).open("rb") as stream:
                stream.seek(place.start)
                stream.readinto(content)
            if zlib.crc32(content) != place.crc32:
                raise ValueError("checksum differs")
            if (count := math.prod(sizes)) == 0:
                return torch.empty(sizes, dtype=dtype)
            values = torch.frombuffer(content, dtype=torch.uint8, offset=place.data_start, count=count * dtype.itemsize)
            return values.view(dtype).view(sizes)
        except _UNREADABLE as error:
            raise ValueError(
                f"{self.folder / place.file} is damaged: {place.num_bytes} bytes at {place.start} do not hold "
                f"{chunk.fqn} ({error})."
            ) from error


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
            planner=_RowMajorPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        chunks = [(box, metadata.storage_data[MetadataIndex(name, box.offsets)]) for box in entry.chunks]
        tensors[name] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [[list(box.offsets), list(box.sizes), _Place(*_fields(place))] for box, place in chunks],
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
    try:
        raw = read_bounded(file)
        check_seal(raw)
        content = json.loads(raw)
        index = _parse(content)
        checksum, files = content["metadata_crc32"], dict(content["files"])
    except _UNREADABLE as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    for name, num_bytes in files.items():
        data = folder / name
        if not is_regular(data):
            raise ValueError(f"{data} is damaged: it is not there, or no regular file.")
        found = data.stat().st_size
        if found != num_bytes:
            raise ValueError(f"{data} is damaged: it has {found} bytes, and its index says {str(num_bytes)[:40]}.")
    if _checksum_of(folder / _PICKLED_INDEX) != checksum:
        raise ValueError(f"{folder / _PICKLED_INDEX} is damaged: checksum differs.")
    return index


def _checksum_of(file: Path) -> int:
    """Return the checksum of a file of any size, a piece at a time."""
    checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


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
    if _PICKLED_INDEX not in files:
        raise ValueError(f"it does not list {_PICKLED_INDEX}")
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
            places[key] = _parse_place(place, files, math.prod(box.sizes) * dtype.itemsize)
        _check_cover(name, shape, boxes)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), shape, boxes)
    return Index(tensors, places)


def _fields(place: Any) -> tuple[str, int, int, int, int]:
    return place.relative_path, place.offset, place.length, place.crc32, place.data_start


def _parse_place(fields: list[Any], files: dict[str, int], tensor_bytes: int) -> _Place:
    place = _Place(*fields)
    if any(type(number) is not int for number in place[1:]):
        raise ValueError(f"a chunk lies at {fields}")
    archive_bytes = place.num_bytes - tensor_bytes  # around the tensor
    if not 0 <= place.data_start <= archive_bytes <= _MAX_ARCHIVE_BYTES:
        raise ValueError(f"a chunk of {tensor_bytes} bytes lies at {place.data_start} of {place.num_bytes}")
    if not 0 <= place.start <= place.start + place.num_bytes <= files[place.file]:
        raise ValueError(f"a chunk lies at {place.start} + {place.num_bytes} of {place.file}")
    return place


def _check_cover(name: str, shape: torch.Size, boxes: list[ChunkStorageMetadata]) -> None:
    """Raise unless the chunks lie inside the tensor, none over another, and hold as many elements as it has.

    Ranks cut each dimension on its own, so chunks of different places in a dimension have nothing in common there.
    """
    filled = [box for box in boxes if math.prod(box.sizes) > 0]
    for dim in range(len(shape)):
        spans = sorted({(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in filled})
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                raise ValueError(f"two chunks of {name} overlap at {start} of dimension {dim}")
    for box in boxes:
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True):
            if not (0 <= offset <= extent and 0 <= size <= extent - offset):
                raise ValueError(f"a chunk of {name} {list(shape)} lies at {list(box.offsets)} + {list(box.sizes)}")
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not cover its shape {list(shape)}")


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
