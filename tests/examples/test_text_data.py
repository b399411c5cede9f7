"""Text is found, split and sampled as text_data promises: nothing twice, nothing lost, nothing dependent on ranks."""

import math
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import text_data
import torch
from text_data import ByteCorpus, SequenceSampler, default_text_files, find_text_files


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _sampler(num_tokens: int = 250, seq_length: int = 7, micro_batch_size: int = 3, seed: int = 1) -> SequenceSampler:
    """A text whose byte values are their positions, so that a window shows where it was cut."""
    return SequenceSampler(torch.arange(num_tokens, dtype=torch.uint8), seq_length, micro_batch_size, seed)


def test_default_text_is_the_standard_library_without_tests_and_packages() -> None:
    files = default_text_files()
    assert files == sorted(files) == default_text_files()
    inside = {path.relative_to(sysconfig.get_path("stdlib")) for path in files}
    assert {Path("argparse.py"), Path("json", "decoder.py")} <= inside
    assert {path.suffix for path in inside} == {".py"}
    assert not {part for path in inside for part in path.parts} & {"test", "tests", "site-packages", "idlelib"}
    assert not any(path.name.startswith("_sysconfigdata") for path in inside)


def test_default_text_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"{tmp_path}.*no .py files"):
        default_text_files()


def test_files_are_found_sorted_once_and_without_binary_and_hidden_ones(tmp_path: Path) -> None:
    late = _write(tmp_path / "text" / "z.txt", b"z" * 8192 + b"\0")  # the NUL lies behind the bytes that are looked at
    early = _write(tmp_path / "text" / "a" / "b.md", b"b")
    _write(tmp_path / "text" / "a" / "c.bin", b"c" * 8191 + b"\0")
    _write(tmp_path / "text" / "d.bin", b"\0")
    _write(tmp_path / "text" / ".git" / "config", b"hidden")
    _write(tmp_path / "text" / ".hidden", b"hidden")
    (tmp_path / "text" / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "text" / "link.txt").symlink_to(late)
    single = _write(tmp_path / "single.txt", b"s")

    assert find_text_files(tmp_path / "text") == ([early, tmp_path / "text" / "link.txt"], 2)
    assert find_text_files([str(single), late, tmp_path / "text", single]) == ([single, late, early], 2)


def test_a_path_without_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\) must be a file or folder that exists"):
        find_text_files(tmp_path / "missing")
    _write(tmp_path / "only" / "a.bin", b"\0")
    with pytest.raises(ValueError, match=r"only\) must hold a text file: 1 binary files"):
        find_text_files(tmp_path / "only")


def test_every_third_block_is_held_out(tmp_path: Path) -> None:
    files = [_write(tmp_path / "a", b"aabb"), _write(tmp_path / "b", b"ccddeef")]  # 11 bytes: blocks of 11 // 3 = 3
    corpus = ByteCorpus.from_files(files, valid_fraction=1 / 3)
    assert bytes(corpus.train.tolist()) == b"aabbccef"  # aab bcc | ef
    assert bytes(corpus.valid.tolist()) == b"dde"
    assert (corpus.train.dtype, corpus.num_files) == (torch.uint8, 2)


def test_large_text_is_split_in_blocks_of_64_kib(tmp_path: Path) -> None:
    size = 64 * 1024
    text = b"".join(bytes([index]) * size for index in range(41)) + b"end"
    corpus = ByteCorpus.from_files([_write(tmp_path / "text", text)])
    expected = bytes([19]) * size + bytes([39]) * size
    assert bytes(corpus.valid.numpy()) == expected
    assert bytes(corpus.train.numpy()) == text[: 19 * size] + text[20 * size : 39 * size] + text[40 * size :]


def test_max_bytes_cuts_the_text(tmp_path: Path) -> None:
    files = [_write(tmp_path / name, name.encode() * 4) for name in "abc"]
    corpus = ByteCorpus.from_files(files, valid_fraction=0.5, max_bytes=6)
    assert (bytes(corpus.train.tolist()), bytes(corpus.valid.tolist())) == (b"aaa", b"abb")
    assert corpus.num_files == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valid_fraction": 0.0}, r"valid_fraction \(0.0\) must be above 0 and at most 0.5"),
        ({"valid_fraction": 0.6}, r"valid_fraction \(0.6\)"),
        ({"max_bytes": 0}, r"max_bytes \(0\) must be at least 1"),
        ({}, r"text \(19 bytes in 1 files\) must have at least 20 bytes"),
    ],
)
def test_a_corpus_that_cannot_be_split_is_refused(tmp_path: Path, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByteCorpus.from_files([_write(tmp_path / "text", b"x" * 19)], **options)


def test_unigram_entropy_is_the_cross_entropy_of_smoothed_frequencies() -> None:
    train, valid = b"abracadabra", b"bad\xff"
    corpus = ByteCorpus(train=torch.tensor(list(train)).byte(), valid=torch.tensor(list(valid)).byte(), num_files=1)
    counts = Counter(train)
    expected = -sum(math.log((counts[byte] + 1) / (len(train) + 256)) for byte in valid) / len(valid)
    assert corpus.unigram_entropy() == pytest.approx(expected, rel=1e-12)


def test_targets_are_inputs_one_position_on() -> None:
    inputs, targets = _sampler().batch(step=3, micro_step=0, rank=0, num_ranks=1)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))  # [3, 7]
    assert torch.equal(targets, inputs + 1)


def test_draws_are_pinned_so_that_a_resumed_run_sees_the_same_text() -> None:
    sampler = _sampler()
    assert sampler.batch(5, 0, 0, 1)[0][:, 0].tolist() == [8, 152, 122]
    sampler.batch(6, 0, 0, 1)
    assert sampler.batch(5, 0, 0, 1)[0][:, 0].tolist() == [8, 152, 122]


@pytest.mark.parametrize(("num_micro_steps", "num_ranks"), [(4, 1), (2, 2), (1, 4), (3, 2)])
def test_global_batch_is_the_same_however_it_is_cut(num_micro_steps: int, num_ranks: int) -> None:
    expected = _sampler(micro_batch_size=12).batch(9, 0, 0, 1)
    sampler = _sampler(micro_batch_size=12 // (num_micro_steps * num_ranks))
    cut = [sampler.batch(9, micro, rank, num_ranks) for micro in range(num_micro_steps) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([inputs for inputs, _ in cut]), expected[0])
    assert torch.equal(torch.cat([targets for _, targets in cut]), expected[1])


def test_seed_step_micro_step_and_rank_change_the_draw() -> None:
    draws = [
        _sampler(seed=seed).batch(step, micro_step, rank, 2)[0][:, 0].tolist()
        for seed in (1, 2)
        for step in (1, 2)
        for micro_step in (0, 1)
        for rank in (0, 1)
    ]
    assert len({tuple(draw) for draw in draws}) == 16


def test_every_window_can_be_drawn_up_to_the_last_byte() -> None:
    sampler = _sampler(num_tokens=10, seq_length=7)
    starts = Counter(start for step in range(200) for start in sampler.batch(step, 0, 0, 1)[0][:, 0].tolist())
    assert sorted(starts) == [0, 1, 2]
    assert min(starts.values()) > 150  # of 600, 200 expected
    _, targets = _sampler(num_tokens=8, seq_length=7).batch(1, 0, 0, 1)
    assert targets[:, -1].tolist() == [7, 7, 7]


def test_impossible_sizes_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"text \(7 bytes\) must have at least seq_length \+ 1 = 8 bytes"):
        _sampler(num_tokens=7, seq_length=7)
    with pytest.raises(ValueError, match=r"seq_length \(0\) must be at least 1"):
        _sampler(seq_length=0)
    with pytest.raises(ValueError, match=r"micro_batch_size \(0\) must be at least 1"):
        _sampler(micro_batch_size=0)
    with pytest.raises(ValueError, match=r"rank \(2\) must be at least 0 and below num_ranks \(2\)"):
        _sampler().batch(1, 0, 2, 2)
    with pytest.raises(ValueError, match=r"num_batches \(3\) must be a positive multiple of num_ranks \(2\).*is 4"):
        _sampler().heldout_batches(3, 0, 2)
    with pytest.raises(ValueError, match=r"num_batches \(0\).*is 1"):
        _sampler().heldout_batches(0)


def test_heldout_windows_are_evenly_spaced_and_shared_out_over_ranks() -> None:
    sampler = _sampler(num_tokens=127, seq_length=7, micro_batch_size=3)  # 120 starts for 12 windows
    batches = list(sampler.heldout_batches(4))
    starts = [inputs[:, 0].tolist() for inputs, _ in batches]
    assert starts == [[0, 10, 20], [30, 40, 50], [60, 70, 80], [90, 100, 110]]
    assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)

    of_rank = [[inputs[:, 0].tolist() for inputs, _ in sampler.heldout_batches(4, rank, 2)] for rank in (0, 1)]
    assert of_rank == [[starts[0], starts[2]], [starts[1], starts[3]]]
    other_seed = _sampler(num_tokens=127, seed=99).heldout_batches(4)
    assert [inputs[:, 0].tolist() for inputs, _ in other_seed] == starts
