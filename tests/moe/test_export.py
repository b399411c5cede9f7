"""Safetensors export: read by the library itself, imported bit by bit, crashes, and files that do not fit."""

import errno
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from moe import export_safetensors, import_safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Mixed(nn.Module):
    """Tensors of every dtype, narrow and wide ones by turns, and of every odd kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(reversed(DTYPES)):
            self.register_buffer(f"buffer_{number}", self.random(3, 1 + number).to(dtype))
        self.weight = nn.Parameter(self.random(6, 4))
        self.transposed = nn.Parameter(self.random(4, 6).t())
        self.part = nn.Parameter(self.random(9, 9)[2:5, 1:8:3])
        self.register_buffer("scalar", self.random())
        self.register_buffer("empty", self.random(0, 3))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * 50


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (actual[name], tensor))
        assert torch.equal(one, other), name


def read_all(directory: Path) -> dict[str, Tensor]:
    """Read every file with the library alone, and check Hugging Face's index where there is one."""
    files = sorted(directory.glob("*.safetensors"))
    found = {file.name: safetensors.torch.load_file(file) for file in files}
    tensors = {name: tensor for content in found.values() for name, tensor in content.items()}
    if files != [directory / SINGLE]:
        index = json.loads((directory / INDEX).read_text())
        assert index["weight_map"] == {name: file for file, content in found.items() for name in content}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export of two files and more."""
    export_safetensors(Mixed(1), tmp_path / "export", max_shard_bytes=300)
    return tmp_path / "export"


def assert_refused(folder: Path, text: str, model: nn.Module | None = None) -> None:
    model = model or Mixed(2)
    before = values(model)
    with pytest.raises(ValueError, match=text):
        import_safetensors(model, folder)
    assert_bits(values(model), before)


def test_every_dtype_and_kind_of_tensor(tmp_path: Path) -> None:
    model, other = Mixed(1), Mixed(2)
    export_safetensors(model, tmp_path / "a" / "b")
    assert names_in(tmp_path / "a" / "b") == {SINGLE}
    content = (tmp_path / "a" / "b" / SINGLE).read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:data]).items():
        width = 1 if name == "__metadata__" else model.state_dict()[name].itemsize
        assert (data + entry.get("data_offsets", [-data])[0]) % width == 0  # a memory map of it is aligned
    assert_bits(read_all(tmp_path / "a" / "b"), values(model))
    import_safetensors(other, tmp_path / "a" / "b")
    assert_bits(values(other), values(model))
    assert other.transposed.stride() == (1, 6)


@pytest.mark.parametrize("max_shard_bytes", [1, 50, 300])
def test_several_files_with_an_index(tmp_path: Path, max_shard_bytes: int) -> None:
    model, other = Mixed(1), Mixed(2)
    export_safetensors(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert_bits(read_all(tmp_path), values(model))
    files = sorted(tmp_path.glob("*.safetensors"))
    names = {f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))}
    assert names_in(tmp_path) == names | {INDEX}
    for file in files:
        tensors = safetensors.torch.load_file(file)
        assert (
            sum(t.nbytes for t in tensors.values()) <= max_shard_bytes
            or sum(t.numel() > 0 for t in tensors.values()) == 1
        )
    import_safetensors(other, tmp_path)
    assert_bits(values(other), values(model))


def test_a_file_ends_before_the_tensor_that_would_exceed_it(tmp_path: Path) -> None:
    model = nn.ParameterList(torch.zeros(size) for size in (10, 15, 1, 30, 25))  # 40, 60, 4, 120, 100 bytes
    export_safetensors(model, tmp_path, max_shard_bytes=100)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [int(weight_map[str(number)][6:11]) for number in range(5)] == [1, 1, 2, 3, 4]
    export_safetensors(model, tmp_path / "single", max_shard_bytes=324)
    assert names_in(tmp_path / "single") == {SINGLE}


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_shard_bytes \(0\) must be at least 1"):
        export_safetensors(Mixed(1), tmp_path, max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"weight is on the meta device"):
        export_safetensors(nn.Linear(2, 2, device="meta"), tmp_path)
    with pytest.raises(ValueError, match=r"0 is torch.complex64, and safetensors files hold F64, F32"):
        export_safetensors(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), tmp_path)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("max_shard_bytes", [10, 10_000])
def test_an_export_is_not_overwritten(tmp_path: Path, max_shard_bytes: int) -> None:
    export_safetensors(Mixed(1), tmp_path, max_shard_bytes=max_shard_bytes)
    with pytest.raises(ValueError, match=rf"{SINGLE}.* is there already: remove that export, or name another"):
        export_safetensors(Mixed(2), tmp_path)
    assert_bits(read_all(tmp_path), values(Mixed(1)))


class CrashError(BaseException):
    pass


@pytest.mark.parametrize("max_shard_bytes", [300, 10_000])
def test_a_crash_at_any_moment_leaves_no_half_file(tmp_path: Path, max_shard_bytes: int) -> None:
    model, crashes = Mixed(1), 0
    while True:
        directory = tmp_path / str(crashes)
        calls = iter(range(1000))

        def guarded(function: Callable[..., Any], calls: Any = calls, crash: int = crashes) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if next(calls) == crash:
                    raise CrashError
                return function(*args)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(os, name, guarded(getattr(os, name)))
            try:
                export_safetensors(model, directory, max_shard_bytes=max_shard_bytes)
            except CrashError:
                crashes += 1
            else:
                break
        left = names_in(directory)
        for name in left - {INDEX, ".writing-safetensors"}:
            for key, tensor in safetensors.torch.load_file(directory / name).items():
                assert torch.equal(tensor, model.state_dict()[key])
        if not left & {SINGLE, INDEX}:
            with pytest.raises(FileNotFoundError, match=rf"no export in {directory}: looked for"):
                import_safetensors(Mixed(2), directory)
            export_safetensors(model, directory, max_shard_bytes=max_shard_bytes)
            assert ".writing-safetensors" not in names_in(directory)
        assert_bits(read_all(directory), values(model))
    assert crashes >= (9 if max_shard_bytes == 300 else 3)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RuntimeError, match=rf"writing {tmp_path}/{SINGLE} failed .*No space left on device"):
            export_safetensors(Mixed(1), tmp_path)
    assert names_in(tmp_path) == {".writing-safetensors"}


def test_missing_unexpected_and_differing_tensors_are_listed(folder: Path) -> None:
    model = Mixed(2)
    del model.buffer_3
    model.more = nn.Parameter(torch.zeros(2))
    model.weight = nn.Parameter(torch.zeros(4, 6))
    model.part = nn.Parameter(model.part.bfloat16())
    text = (
        r"1 missing in the files: more; 1 unexpected in the files: buffer_3 \(model-0000.-of-0000.\.safetensors\); "
        r"2 differing in dtype or shape: part \(model-.*: F32 \[3, 3\], here: BF16 \[3, 3\]\), "
        r"weight \(model-.*\.safetensors: F32 \[6, 4\], here: F32 \[4, 6\]\)\.$"
    )
    assert_refused(folder, text, model)


def test_a_long_list_is_cut_after_ten(folder: Path) -> None:
    model = Mixed(2)
    for number in range(12):
        model.register_buffer(f"more_{number:02d}", torch.ones(1))
    assert_refused(folder, r"12 missing .* more_09, \.\.\.\.$", model)


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]


def header(content: dict[str, Any], length: int = 0) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + bytes(length)


FAR = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
OVERLAP = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:60],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: b"PK\x03\x04" + content,
        lambda content: content[:8] + b"[" * 60_000,
        lambda content: header({"weight": FAR}),
        lambda content: header(OVERLAP, 4),
        flip(0),
        flip(8),
    ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[bytes], bytes], number: int) -> None:
    file = sorted(folder.glob("*.safetensors"))[number - 1]
    file.write_bytes(damage(file.read_bytes()))
    assert_refused(folder, rf"model-0000{number}-of-0000\d\.safetensors is damaged: ")


def test_every_flipped_bit_of_a_header_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    export_safetensors(model, tmp_path)
    file = tmp_path / SINGLE
    content, texts = file.read_bytes(), []
    for position in range(8 * (8 + int.from_bytes(content[:8], "little"))):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        other = nn.Linear(3, 2)
        before = values(other)
        try:
            import_safetensors(other, tmp_path)
        except ValueError as error:
            texts.append(str(error))
            assert_bits(values(other), before)
        else:
            assert_bits(values(other), values(model))
    assert len(texts) > 500
    assert [text for text in texts if SINGLE not in text and "missing in the files" not in text] == []


def edit_map(**changes: Any) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        index = json.loads(file.read_text())
        index["weight_map"] |= changes
        file.write_text(json.dumps(index))

    return edit


def sparse(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(1 << 42)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (edit_map(weight="../model.safetensors"), rf"{INDEX} is damaged: .*'\.\./model.safetensors' is no file name"),
        (edit_map(weight="/etc/x.safetensors"), rf"{INDEX} is damaged: .*'/etc/x.safetensors' is no file name"),
        (edit_map(weight="a\0b.safetensors"), rf"{INDEX} is damaged: .*is no file name"),
        (edit_map(weight=3), rf"{INDEX} is damaged: TypeError"),
        (edit_map(weight=["x"]), rf"{INDEX} is damaged: TypeError"),
        (edit_map(more="other.safetensors"), r"other.safetensors is damaged: no such file"),
        (edit_map(more="model-00001-of-00004.safetensors"), r"00001-of-00004.safetensors is damaged: .* it holds more"),
        (edit_map(buffer_0="model-00002-of-00004.safetensors"), r"00001-of-.* is damaged: it holds buffer_0, and"),
        (lambda file: file.write_text("[" * 100_000), rf"{INDEX} is damaged: RecursionError"),
        (lambda file: file.write_text('{"weight_map": []}'), rf"{INDEX} is damaged: AttributeError"),
        (lambda file: file.write_text("{"), rf"{INDEX} is damaged: JSONDecodeError"),
        (lambda file: file.write_bytes(b"\xff\xfe\xff"), rf"{INDEX} is damaged: "),
        (sparse, rf"{INDEX} is damaged: .*it is no file of at most"),
        (pipe, rf"{INDEX} is damaged: .*it is no file of at most"),
    ],
)
def test_a_hostile_index_is_refused(folder: Path, damage: Callable[[Path], None], text: str) -> None:
    assert len(list(folder.glob("*.safetensors"))) == 4
    damage(folder / INDEX)
    assert_refused(folder, text)


def test_a_pipe_in_place_of_a_file_does_not_block(folder: Path) -> None:
    pipe(folder / "model-00002-of-00004.safetensors")
    assert_refused(folder, "model-00002-of-00004.safetensors is damaged: no such file")


def test_without_the_library_exporting_works_and_importing_says_how(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    export_safetensors(Mixed(1), tmp_path)
    with pytest.raises(ImportError, match=r'pip install "moe-pipeline\[export\]"'):
        import_safetensors(Mixed(1), tmp_path)
