"""The folders of checkpoints: which are whole, which is the latest, how one appears and goes at once.

A folder named iter_<step> is whole, because it got that name by a rename after all its files were flushed to the disk.
Names with a dot are work under way, or what a crash left of it:

    .writing-iter_<step>    being written
    .replaced-iter_<step>   whole; moved aside for a new folder of the same step
    .removing-iter_<step>   being removed
"""

import io
import os
import re
import shutil
import stat
import zlib
from pathlib import Path

_LATEST = "latest_checkpointed_iteration.txt"
MAX_JSON_BYTES = 1 << 28  # parsed, JSON is up to 25 times as large
_SEAL = re.compile(rb', "crc32": ([0-9]{1,10})}')
_FOLDER_NAME = re.compile(r"iter_([0-9]{7,})")


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the step that the latest-iteration file names, or None where there is no such file.

    Raises:
        ValueError: it is no regular file, or holds something else than a number.
    """
    file = Path(directory) / _LATEST
    if not os.path.lexists(file):
        return None
    with file.open("rb") if is_regular(file) else io.BytesIO(b"no regular file") as stream:
        text = stream.read(64).decode("ascii", "replace").strip()
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{file} holds {text[:40]!r}, not a step; pass step=, one of {whole_steps(file.parent)}.")
    return int(text)


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder, as Megatron-Core writes it."""
    return f"iter_{step:07d}"


def whole_steps(directory: Path) -> list[int]:
    """Return the steps that have a folder, in rising order."""
    names = (_FOLDER_NAME.fullmatch(folder.name) for folder in directory.glob("iter_*") if folder.is_dir())
    return sorted(int(name[1]) for name in names if name)


def find_folder(directory: Path, step: int | None) -> Path:
    """Return the folder of a step.

    Raises:
        FileNotFoundError: there is none, or `step` is None because the latest-iteration file is not there.
    """
    wanted = _LATEST if step is None else folder_name(step)
    if step is not None:
        # A crash between the two renames of a replacement leaves the old folder under the second name.
        for folder in (directory / wanted, directory / f".replaced-{wanted}"):
            if folder.is_dir():
                return folder
    steps = whole_steps(directory)
    found = f"whole are the steps {steps}: pass step=" if steps else "no iter_ folder is there"
    raise FileNotFoundError(f"no checkpoint in {directory}: looked for {wanted}; {found}.")


def remove_leftovers(directory: Path) -> None:
    """Bring back a checkpoint whose replacement was cut short, and remove what other crashes left."""
    for aside in directory.glob(".replaced-iter_*"):
        final = aside.with_name(aside.name.removeprefix(".replaced-"))
        if not final.exists():
            os.rename(aside, final)
    for pattern in (".replaced-iter_*", ".removing-iter_*", ".writing-iter_*"):
        for leftover in directory.glob(pattern):
            # What is in use elsewhere (NFS) goes at a later save.
            shutil.rmtree(leftover, ignore_errors=True)


def publish(writing: Path, folder: Path, step: int) -> None:
    """Give a written folder its final name, then let the latest-iteration file name its step."""
    aside = folder.with_name(f".replaced-{folder.name}")
    if folder.exists():
        os.rename(folder, aside)
    os.rename(writing, folder)
    flush_folder(folder.parent)
    latest = folder.with_name(f".writing-{_LATEST}")
    write_durably(latest, f"{step}\n")
    os.replace(latest, folder.with_name(_LATEST))
    flush_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def prune(directory: Path, step: int, keep_last: int) -> None:
    """Remove all but the newest `keep_last` of the checkpoints up to `step`."""
    older = [other for other in whole_steps(directory) if other < step]
    for other in older[: max(0, len(older) + 1 - keep_last)]:
        folder = directory / folder_name(other)
        # A removal that is cut short must not leave a half checkpoint under a whole one's name.
        removing = folder.with_name(f".removing-{folder.name}")
        os.rename(folder, removing)
        shutil.rmtree(removing, ignore_errors=True)


def is_regular(file: Path) -> bool:
    """Whether there is a file of that name: no folder, pipe or device, and no link to something elsewhere."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def sealed(text: str) -> str:
    """Return the text of a JSON object that is not empty with one more key at its end, the checksum of all before it.

    Raises:
        ValueError: it is longer than what is read.
    """
    body = text.removesuffix("}").rstrip().encode()
    if len(body) > MAX_JSON_BYTES - 100:
        raise ValueError(f"a file of {len(body)} bytes of JSON exceeds {MAX_JSON_BYTES - 100}: put less into extra.")
    return f'{body.decode()}, "crc32": {zlib.crc32(body)}}}'


def read_bounded(file: Path) -> bytes:
    """Return the content of a regular file of a size that can be parsed, else raise ValueError."""
    if not is_regular(file) or file.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"it is no regular file of at most {MAX_JSON_BYTES} bytes")
    return file.read_bytes()


def check_seal(content: bytes) -> None:
    """Raise ValueError unless the content is as `sealed` made it."""
    body, *_ = content.rpartition(b', "crc32": ')
    seal = _SEAL.fullmatch(content, len(body))
    if seal is None or int(seal[1]) != zlib.crc32(body):
        raise ValueError("its checksum is missing or differs")


def write_durably(file: Path, text: str) -> None:
    """Write a text file and wait until the disk has it."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
