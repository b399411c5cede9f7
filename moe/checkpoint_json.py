"""JSON files of a checkpoint: they carry a checksum of what they say, and are read within bounds."""

import json
import stat
import zlib
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 28
_CHECKSUM = "crc32"


def sealed_json(content: dict[str, Any]) -> str:
    """Return `content` as JSON text with a checksum of what it says.

    Raises:
        TypeError, ValueError: `content` holds what JSON cannot hold.
    """
    plain = json.loads(json.dumps(content))  # keys become strings, tuples lists: what will be read
    return json.dumps({_CHECKSUM: _checksum(plain), **plain})


def read_json(file: Path) -> dict[str, Any]:
    """Return what `sealed_json` made a text of.

    Raises:
        ValueError: the file is missing, no regular file, larger than 256 MiB, no such JSON, or says something else
            than was written; the message names it.
    """
    try:
        if (num_bytes := regular_size(file)) > _MAX_BYTES:
            raise ValueError(f"it has {num_bytes} bytes, and at most {_MAX_BYTES} are read")
        content = json.loads(file.read_bytes())
        if content.pop(_CHECKSUM) != _checksum(content):
            raise ValueError("checksum differs")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}.") from error
    return content


def regular_size(file: Path) -> int:
    """Return the bytes of a file that is neither a link nor a pipe nor a device.

    Raises:
        OSError: there is none.
        ValueError: it is something else.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    return status.st_size


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
