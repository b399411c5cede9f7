"""Byte-level text for training: files to a corpus, a corpus to batches that need no state to resume.

Shapes: N bytes of text, B sequences of a micro-batch, S sequence length.
"""

from __future__ import annotations

import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256  # a token is a byte
BLOCK_BYTES = 64 * 1024  # text is split into training and held-out text in blocks of this size
SNIFFED_BYTES = 8 * 1024  # a NUL byte in so many first bytes marks a file as binary
NOT_DEFAULT_FOLDERS = {"test", "tests", "idlelib", "site-packages", "dist-packages"}


def default_text_files() -> list[Path]:
    """Return the Python standard library's own sources, sorted: text that every machine already has.

    Left out are tests, IDLE, installed packages and the build-time settings, which differ from machine to machine.

    Raises:
        ValueError: the standard library lies there without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _files_below(root, left_out=NOT_DEFAULT_FOLDERS)
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise ValueError(f"the standard library's folder ({root}) holds no .py files; name text files of your own.")
    return files


def find_text_files(paths: str | Path | Sequence[str | Path]) -> tuple[list[Path], int]:
    """Return the text files among files and folders, and how many binary files were left out.

    Folders are searched recursively in sorted order, without hidden files and folders and without following links to
    folders. A file that is reached twice counts once: a copy could end up on both sides of the held-out split.

    Args:
        paths: one file or folder, or several; their order is kept.

    Returns:
        The text files, and the number of files left out for a NUL byte in their first 8 KiB.

    Raises:
        ValueError: a path does not exist, or no text file is left.
    """
    roots = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    found: dict[Path, Path] = {}  # resolved path -> path as found
    for root in roots:
        if not root.exists():
            raise ValueError(f"text path ({root}) must be a file or folder that exists.")
        for path in _files_below(root) if root.is_dir() else [root]:
            found.setdefault(path.resolve(), path)
    files = [path for path in found.values() if not _is_binary(path)]
    num_binary = len(found) - len(files)
    if not files:
        names = ", ".join(map(str, roots))
        raise ValueError(f"text path ({names}) must hold a text file: {num_binary} binary files found and no other.")
    return files, num_binary


@dataclass(frozen=True, eq=False, kw_only=True)
class ByteCorpus:
    """Text as bytes, cut into training and held-out text that share no byte position."""

    train: Tensor  # [N_train] uint8
    valid: Tensor  # [N_valid] uint8, held out
    num_files: int  # files that were read

    @classmethod
    def from_files(
        cls, files: Sequence[Path], valid_fraction: float = 0.05, max_bytes: int | None = None
    ) -> ByteCorpus:
        """Read the files, join them in order and hold out every n-th block, n = round(1 / valid_fraction).

        Blocks of 64 KiB spread the held-out text over all files. A text of fewer than n such blocks is cut into smaller
        ones, so that one is always held out. n = 3: `b0 b1 b2 b3 b4 b5 b6` -> train `b0 b1 b3 b4 b6`, valid `b2 b5`.

        Args:
            files: text files; the order matters.
            valid_fraction: share of the text to hold out, above 0 and at most 0.5.
            max_bytes: read no more than the first so many bytes; None reads all.

        Raises:
            ValueError: valid_fraction or max_bytes out of range, or fewer bytes than one for each of the n blocks.
        """
        if not 0.0 < valid_fraction <= 0.5:
            raise ValueError(f"valid_fraction ({valid_fraction}) must be above 0 and at most 0.5.")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes ({max_bytes}) must be at least 1, or None for the whole text.")
        text, num_files = _read_joined(files, max_bytes)
        period = round(1 / valid_fraction)
        if len(text) < period:
            raise ValueError(
                f"text ({len(text)} bytes in {num_files} files) must have at least {period} bytes to hold out"
                f" {valid_fraction} of it; give more text."
            )
        blocks = torch.frombuffer(text, dtype=torch.uint8).split(min(BLOCK_BYTES, len(text) // period))
        return cls(
            train=torch.cat([block for index, block in enumerate(blocks) if index % period != period - 1]),
            valid=torch.cat(blocks[period - 1 :: period]),
            num_files=num_files,
        )

    def unigram_entropy(self) -> float:
        """Return the held-out cross-entropy, in nats per byte, of the training text's byte frequencies.

        Counts are smoothed by adding one. It is what a model reaches that ignores the context: the figure to beat.
        """
        counts = torch.bincount(self.train, minlength=VOCAB_SIZE).double() + 1
        log_probs = (counts / counts.sum()).log()  # [256]
        return -log_probs[self.valid.int()].mean().item()


class SequenceSampler:
    """Cuts windows of S + 1 bytes out of a text: S inputs, and the same shifted by one as targets.

    Nothing is remembered between calls, so a resumed run needs no state: a batch follows from its arguments alone.

    Args:
        tokens: [N] uint8.
        seq_length: S.
        micro_batch_size: B.
        seed: another seed draws other windows.

    Raises:
        ValueError: seq_length or micro_batch_size below 1, or a text of fewer than S + 1 bytes.
    """

    def __init__(self, tokens: Tensor, seq_length: int, micro_batch_size: int, seed: int) -> None:
        for name, value in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        if len(tokens) <= seq_length:
            raise ValueError(
                f"text ({len(tokens)} bytes) must have at least seq_length + 1 = {seq_length + 1} bytes;"
                f" give more text or a smaller seq_length ({seq_length})."
            )
        self.tokens = tokens
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.num_starts = len(tokens) - seq_length  # positions at which a window can begin

    def batch(self, step: int, micro_step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return one rank's micro-batch of a training step, drawn at random.

        Sequence i = (micro_step * num_ranks + rank) * B + b of a step's batch depends on (seed, step, i) alone.
        So the same global batch, cut over more ranks or into more micro-steps, has the same sequences.

        Args:
            step: training step.
            micro_step: gradient-accumulation step inside it.
            rank: rank among the ranks that read different data.
            num_ranks: how many of those there are.

        Returns:
            inputs [B, S] int64 and targets [B, S] int64.

        Raises:
            ValueError: rank outside 0 .. num_ranks - 1.
        """
        _check_rank(rank, num_ranks)
        first = (micro_step * num_ranks + rank) * self.micro_batch_size
        indices = range(first, first + self.micro_batch_size)
        # Seeded by text: Python hashes all of it, while sums of small numbers as seeds would collide.
        starts = [random.Random(f"{self.seed}/{step}/{index}").randrange(self.num_starts) for index in indices]
        return self._windows(starts)

    def heldout_batches(self, num_batches: int, rank: int = 0, num_ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one rank's share of evenly spaced windows: the same at each evaluation, for any seed.

        Args:
            num_batches: micro-batches over all ranks; every rank yields num_batches / num_ranks of them.
            rank: rank among the ranks that read different data; it takes batches rank, rank + num_ranks, ...
            num_ranks: how many of those there are; the windows over all ranks do not depend on it.

        Yields:
            inputs [B, S] int64 and targets [B, S] int64.

        Raises:
            ValueError: rank outside 0 .. num_ranks - 1, or num_batches no positive multiple of num_ranks.
        """
        _check_rank(rank, num_ranks)
        if num_batches < 1 or num_batches % num_ranks:
            nearest = max(1, round(num_batches / num_ranks)) * num_ranks
            raise ValueError(
                f"num_batches ({num_batches}) must be a positive multiple of num_ranks ({num_ranks}), or ranks would"
                f" evaluate different numbers of batches; the nearest is {nearest}."
            )
        num_windows = num_batches * self.micro_batch_size
        starts = [window * self.num_starts // num_windows for window in range(num_windows)]
        batches = [
            starts[first : first + self.micro_batch_size] for first in range(0, num_windows, self.micro_batch_size)
        ]
        return map(self._windows, batches[rank::num_ranks])

    def _windows(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        windows = torch.stack(
            [self.tokens[start : start + self.seq_length + 1] for start in starts]
        ).long()  # [B, S + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()  # [B, S], [B, S]


def _check_rank(rank: int, num_ranks: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank ({rank}) must be at least 0 and below num_ranks ({num_ranks}).")


def _files_below(root: Path, left_out: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below a folder, sorted, without hidden ones and without the folder names left out."""
    files: list[Path] = []
    for folder, folder_names, file_names in os.walk(root):
        folder_names[:] = [name for name in folder_names if not name.startswith(".") and name not in left_out]
        paths = [Path(folder, name) for name in file_names if not name.startswith(".")]
        files += [path for path in paths if path.is_file()]  # no pipes, no broken links
    return sorted(files)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(SNIFFED_BYTES)


def _read_joined(files: Sequence[Path], max_bytes: int | None) -> tuple[bytearray, int]:
    """Return the first max_bytes bytes of the joined files, and how many files were opened for them."""
    text = bytearray()
    num_files = 0
    for path in files:
        if max_bytes is not None and len(text) >= max_bytes:
            break
        with path.open("rb") as file:
            text += file.read(-1 if max_bytes is None else max_bytes - len(text))
        num_files += 1
    return text, num_files
