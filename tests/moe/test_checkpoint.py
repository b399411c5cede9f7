"""Checkpoints: bitwise round trips between layouts of ranks, crashes at every step of a save, hostile files."""

import errno
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moe import checkpoint_storage
from moe.checkpoint import LoadedCheckpoint, latest_step, load_checkpoint, save_checkpoint
from moe.checkpoint_folders import sealed
from tests.ranks import run_ranks

NUM_EXPERTS, FFN, HIDDEN = 8, 3, 5
LATEST = "latest_checkpointed_iteration.txt"
# World size: expert-parallel sizes; 2 of 4 has two expert-data-parallel replicas.
LAYOUTS = {1: [1], 2: [2], 4: [4, 2]}


class TinyMoE(nn.Module):
    """A dense parameter, an expert parameter (a DTensor where there is a mesh) and buffers."""

    def __init__(self, seed: int, mesh: Any = None) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.mesh = mesh
        self.router = nn.Parameter(self.random(NUM_EXPERTS, HIDDEN))
        self.experts = nn.Parameter(self.sharded(self.random(NUM_EXPERTS, FFN, HIDDEN)))
        self.register_buffer("expert_bias", self.random(NUM_EXPERTS))
        self.register_buffer("tokens", torch.randint(0, 1 << 40, (), generator=self.generator))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def sharded(self, tensor: Tensor) -> Tensor:
        if self.mesh is None:
            return tensor
        local = tensor.chunk(self.mesh.size())[self.mesh.get_local_rank()]
        return DTensor.from_local(local.clone(), self.mesh, [Shard(0)])

    def train_steps(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        for _ in range(num_steps):
            self.router.grad = self.random(*self.router.shape)
            self.experts.grad = self.sharded(self.random(*self.experts.shape))
            optimizer.step()


def make(seed: int, mesh: Any = None, lr: float = 0.01) -> tuple[TinyMoE, torch.optim.AdamW]:
    model = TinyMoE(seed, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.8, 0.9))


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            state |= {f"{name}.{key}": slot for key, slot in optimizer.state[parameter].items()}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {name: t.detach().clone() for name, t in full.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def saved(directory: Path, *steps: int, keep_last: int = 9) -> tuple[TinyMoE, torch.optim.AdamW]:
    """Save one checkpoint a step, its values made from the step as the seed, and return the last state."""
    for step in steps:
        model, optimizer = make(step)
        model.train_steps(optimizer, 2)
        save_checkpoint(directory, step, model, optimizer, keep_last=keep_last)
    return model, optimizer


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def expert_mesh(ep_size: int) -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // ep_size, ep_size), mesh_dim_names=("edp", "ep"))["ep"]


def save_worker(root: Path, ep_sizes: list[int]) -> dict[Path, dict[str, Tensor]]:
    expected = {}
    for ep_size in ep_sizes:
        directory = root / f"{dist.get_world_size()}-{ep_size}"
        model, optimizer = make(11, expert_mesh(ep_size))
        model.train_steps(optimizer, 3)
        path = save_checkpoint(directory, 50, model, optimizer, extra={"tokens": 1 << 60, "name": "é"})
        assert path == directory / "iter_0000050"
        assert path.is_dir()
        expected[directory] = values(model, optimizer)
    return expected


def load_worker(expected: dict[Path, dict[str, Tensor]], ep_sizes: list[int]) -> int:
    num_loaded = 0
    for ep_size in ep_sizes:
        for directory, state in expected.items():
            model, optimizer = make(12, expert_mesh(ep_size), lr=0.5)
            loaded = load_checkpoint(directory, model, optimizer)
            path = directory / "iter_0000050"
            assert loaded == LoadedCheckpoint(step=50, extra={"tokens": 1 << 60, "name": "é"}, path=path)
            assert_same(values(model, optimizer), state)
            assert optimizer.param_groups[0]["lr"] == 0.01
            moments = [optimizer.state[model.experts][key] for key in ("exp_avg", "exp_avg_sq")]
            assert all(isinstance(moment, DTensor) and moment.placements == (Shard(0),) for moment in moments)
            model.train_steps(optimizer, 1)  # the state is of the kinds that the optimizer takes
            num_loaded += 1
    return num_loaded


@pytest.fixture(scope="module")
def saved_layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("layouts")
    expected: dict[Path, dict[str, Tensor]] = {}
    for world_size, ep_sizes in LAYOUTS.items():
        expected |= run_ranks(save_worker, world_size, root, ep_sizes)[0]
    return expected


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_loads_what_every_layout_saved(
    saved_layouts: dict[Path, dict[str, Tensor]], world_size: int
) -> None:
    ep_sizes = LAYOUTS[world_size]
    num_loaded = 4 * len(ep_sizes)
    assert run_ranks(load_worker, world_size, saved_layouts, ep_sizes) == [num_loaded] * world_size


def test_one_process_without_a_group_loads_what_ranks_saved(saved_layouts: dict[Path, dict[str, Tensor]]) -> None:
    for directory, expected in saved_layouts.items():
        model, optimizer = make(12)
        load_checkpoint(directory, model, optimizer)
        assert_same(values(model, optimizer), expected)


def test_replicas_are_written_once(saved_layouts: dict[Path, dict[str, Tensor]]) -> None:
    for directory in saved_layouts:
        world_size, ep_size = map(int, directory.name.split("-"))
        index = json.loads((directory / "iter_0000050" / "index.json").read_text())
        chunks = {name: len(entry["chunks"]) for name, entry in index["tensors"].items()}
        assert chunks["model.experts"] == chunks["optimizer.experts.exp_avg"] == ep_size
        assert chunks["model.router"] == chunks["optimizer.router.exp_avg"] == 1
        assert len(index["files"]) == world_size + 1


def test_other_tools_read_the_folder(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, 1)
    target = {"model.router": torch.zeros(NUM_EXPERTS, HIDDEN)}
    torch.distributed.checkpoint.load(target, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
    assert torch.equal(target["model.router"], model.router)


def test_training_goes_on_bitwise(tmp_path: Path) -> None:
    straight, straight_optimizer = make(1)
    straight.train_steps(straight_optimizer, 3)
    save_checkpoint(tmp_path, 3, straight, straight_optimizer)
    resumed, resumed_optimizer = make(2, lr=7.0)
    load_checkpoint(tmp_path, resumed, resumed_optimizer)
    resumed.generator.set_state(straight.generator.get_state())
    straight.train_steps(straight_optimizer, 2)
    resumed.train_steps(resumed_optimizer, 2)
    assert_same(values(resumed, resumed_optimizer), values(straight, straight_optimizer))


def test_missing_and_unexpected_keys_are_listed_and_nothing_is_copied(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model, _ = make(2)
    model.extra_weight = nn.Parameter(torch.ones(2))
    del model.expert_bias
    before = values(model)
    with pytest.raises(ValueError, match=r"1 missing .*: model.extra_weight; 1 unexpected .*: model.expert_bias\."):
        load_checkpoint(tmp_path, model)
    assert_same(values(model), before)


def test_a_long_list_of_keys_is_cut_after_ten(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model, _ = make(2)
    for number in range(12):
        model.register_buffer(f"more_{number:02d}", torch.ones(1))
    with pytest.raises(ValueError, match=r"12 missing .* model.more_09, \.\.\.\.$"):
        load_checkpoint(tmp_path, model)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(NUM_EXPERTS, HIDDEN, dtype=torch.float64), r"torch.float32 \[8, 5\], here torch.float64 \[8, 5\]"),
        (torch.zeros(HIDDEN, NUM_EXPERTS), r"torch.float32 \[8, 5\], here torch.float32 \[5, 8\]"),
    ],
)
def test_other_dtype_or_shape(tmp_path: Path, tensor: Tensor, text: str) -> None:
    saved(tmp_path, 1)
    model, _ = make(2)
    model.router = nn.Parameter(tensor)
    before = values(model)
    with pytest.raises(ValueError, match=rf"1 differing in shape or dtype: model.router \(saved {text}\)"):
        load_checkpoint(tmp_path, model)
    assert_same(values(model), before)


def test_optimizer_of_another_class_or_over_other_parameters(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    model, _ = make(2)
    with pytest.raises(ValueError, match=r"the state of AdamW, not of SGD; pass optimizer=None"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match=r"1 unexpected in the saved optimizer: experts\."):
        load_checkpoint(tmp_path, model, torch.optim.AdamW([model.router]))
    model.extra_weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"1 missing in the saved optimizer: extra_weight\."):
        load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_groups_cut_otherwise(tmp_path: Path) -> None:
    expected, expected_optimizer = saved(tmp_path, 1)
    model, together = make(2)
    apart = torch.optim.AdamW([{"params": [model.experts]}, {"params": [model.router]}, {"params": []}], lr=3.0)
    load_checkpoint(tmp_path, model, apart)
    assert_same(values(model, apart), values(expected, expected_optimizer))
    assert [group["lr"] for group in apart.param_groups] == [0.01, 0.01, 3.0]
    apart.param_groups[1]["lr"] = 0.5
    save_checkpoint(tmp_path, 2, model, apart)
    with pytest.raises(ValueError, match=r"different options for router and experts, and param_groups\[0\] has both"):
        load_checkpoint(tmp_path, model, together)


def test_without_an_optimizer_saved_state_is_left(tmp_path: Path) -> None:
    expected, _ = saved(tmp_path, 1)
    model, _ = make(2)
    load_checkpoint(tmp_path, model)
    assert_same(values(model), values(expected))


def test_checkpoint_of_the_model_alone_has_no_optimizer_to_load(tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_checkpoint(tmp_path, 1, model)
    with pytest.raises(ValueError, match="holds no optimizer, not of AdamW"):
        load_checkpoint(tmp_path, model, optimizer)


def test_hyper_parameters_are_restored_but_not_how_a_step_is_executed(tmp_path: Path) -> None:
    model, _ = make(1)
    groups = [{"params": [model.router], "lr": 0.1}, {"params": [model.experts], "weight_decay": 0.25, "name": "e"}]
    optimizer = torch.optim.AdamW(groups, lr=0.3, betas=(0.1, 0.7), foreach=True)
    optimizer.param_groups[0]["initial_lr"] = 0.75
    save_checkpoint(tmp_path, 1, model, optimizer)
    other = torch.optim.AdamW([{"params": [model.router]}, {"params": [model.experts]}], lr=9.0, foreach=False)
    load_checkpoint(tmp_path, model, other)
    first, second = other.param_groups
    assert (first["lr"], first["initial_lr"], first["betas"], first["foreach"]) == (0.1, 0.75, (0.1, 0.7), False)
    assert (second["lr"], second["weight_decay"], second["name"]) == (0.3, 0.25, "e")


def test_stale_state_of_the_optimizer_is_dropped(tmp_path: Path) -> None:
    model, optimizer = make(1)
    save_checkpoint(tmp_path, 0, model, optimizer)
    model.train_steps(optimizer, 1)
    load_checkpoint(tmp_path, model, optimizer)
    assert not optimizer.state


class NumberOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = 1


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = make(1)
    foreign = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=1.0)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has a parameter \[3\] that model does not name"):
        save_checkpoint(tmp_path, 1, model, foreign)
    numbers = NumberOptimizer(model.parameters(), lr=1.0)
    numbers.step()
    with pytest.raises(ValueError, match=r"optimizer.router.count is a int; optimizer state must be tensors"):
        save_checkpoint(tmp_path, 1, model, numbers)
    with pytest.raises(ValueError, match="extra must hold what JSON can hold"):
        save_checkpoint(tmp_path, 1, model, optimizer, extra={"path": tmp_path})
    with pytest.raises(ValueError, match=r"step \(-1\) must be at least 0"):
        save_checkpoint(tmp_path, -1, model)
    with pytest.raises(ValueError, match=r"keep_last \(0\) must be at least 1"):
        save_checkpoint(tmp_path, 1, model, keep_last=0)
    with pytest.raises(ValueError, match=r"model.router is on the meta device"):
        save_checkpoint(tmp_path, 1, make(1)[0].to("meta"))
    assert names_in(tmp_path) == set()


def local_state_worker(directory: Path) -> None:
    model, optimizer = make(1, expert_mesh(2))
    model.train_steps(optimizer, 1)
    optimizer.state[model.experts]["exp_avg"] = torch.zeros(NUM_EXPERTS // 2, FFN, HIDDEN)
    with pytest.raises(ValueError, match=r"optimizer.experts.exp_avg \[4, 3, 5\] belongs to a sharded parameter"):
        save_checkpoint(directory, 1, model, optimizer)


def test_state_of_one_ranks_part_is_refused(tmp_path: Path) -> None:
    run_ranks(local_state_worker, 2, tmp_path)
    assert names_in(tmp_path) == set()


def test_nothing_to_load(tmp_path: Path) -> None:
    model, _ = make(1)
    assert latest_step(tmp_path / "none") is None
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/none: looked for {LATEST}; no iter_ folder is there"):
        load_checkpoint(tmp_path / "none", model)
    saved(tmp_path, 3, 5)
    with pytest.raises(FileNotFoundError, match=r"looked for iter_0000004; whole are the steps \[3, 5\]: pass step="):
        load_checkpoint(tmp_path, model, step=4)
    (tmp_path / LATEST).write_text("release\n")
    with pytest.raises(ValueError, match=r"'release', not a step; pass step=, one of \[3, 5\]"):
        load_checkpoint(tmp_path, model)


def test_old_checkpoints_go_and_leftovers_too(tmp_path: Path) -> None:
    (tmp_path / ".writing-iter_0000009").mkdir()
    (tmp_path / ".removing-iter_0000001").mkdir()
    saved(tmp_path, 10, 20, 30, keep_last=2)
    assert names_in(tmp_path) == {"iter_0000020", "iter_0000030", LATEST}
    saved(tmp_path, 5, keep_last=1)  # after a roll-back: later steps stay, and the new one is the latest
    assert names_in(tmp_path) == {"iter_0000005", "iter_0000020", "iter_0000030", LATEST}
    assert latest_step(tmp_path) == 5


def test_fewer_checkpoints_than_may_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep_last=5)
    assert names_in(tmp_path) == {"iter_0000001", "iter_0000002", "iter_0000003", "iter_0000004", LATEST}


class CrashError(BaseException):
    pass


def crash_at(event: int, crash: Callable[[], Any], patch: Callable[[Any, str, Any], None]) -> None:
    """Call `crash` instead of the event-th flush or rename, or amid the event-th removal, from now on."""
    calls = iter(range(10_000))

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == event:
                if function.__name__ == "rmtree":
                    (Path(args[0]) / "meta.json").unlink(missing_ok=True)
                crash()
            return function(*args, **kwargs)

        return call

    for module, name in [(os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")]:
        patch(module, name, guarded(getattr(module, name)))


def assert_old_or_new(directory: Path, step: int, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    """Check that the latest checkpoint is whole, as are all others, and that the next save and load work."""
    model, optimizer = make(0)
    for present in directory.glob("iter_*"):
        load_checkpoint(directory, model, optimizer, step=int(present.name.removeprefix("iter_")))
    loaded = load_checkpoint(directory, model, optimizer)
    state = values(model, optimizer)
    if step == 1:
        assert any(torch.equal(state["router"], one["router"]) for one in (old, new))
        old = new if torch.equal(state["router"], new["router"]) else old
    assert_same(state, new if loaded.step == 2 else old)
    later, later_optimizer = saved(directory, 3)
    load_checkpoint(directory, model, optimizer)
    assert_same(values(model, optimizer), values(later, later_optimizer))
    assert f"iter_{loaded.step:07d}" in names_in(directory)
    assert not any(name.startswith(".") for name in names_in(directory))


def raise_crash() -> None:
    raise CrashError


@pytest.mark.parametrize("step", [1, 2])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, step: int) -> None:
    model, optimizer = make(77)
    model.train_steps(optimizer, 2)
    new = values(model, optimizer)
    old = values(*saved(tmp_path / "old", 1))
    crashes = 0
    while True:
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(crashes))
        with pytest.MonkeyPatch.context() as patch:
            crash_at(crashes, raise_crash, patch.setattr)
            try:
                save_checkpoint(directory, step, model, optimizer, keep_last=1)
            except (CrashError, RuntimeError):
                crashes += 1
            else:
                break
        assert_old_or_new(directory, step, old, new)
    assert crashes >= 12


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_save(directory: Path, event: int) -> None:
    torch.set_num_threads(1)
    model, optimizer = make(77)
    model.train_steps(optimizer, 2)
    crash_at(event, kill_self, setattr)
    save_checkpoint(directory, 2, model, optimizer, keep_last=1)


@pytest.mark.parametrize("event", [0, 4, 7, 10])
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path, event: int) -> None:
    old = values(*saved(tmp_path, 1))
    model, optimizer = make(77)
    model.train_steps(optimizer, 2)
    process = multiprocessing.get_context("forkserver").Process(target=killed_save, args=(tmp_path, event))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert_old_or_new(tmp_path, 2, old, values(model, optimizer))


def failing_worker(directory: Path) -> list[str]:
    # Under torchrun every rank has a temporary folder of its own.
    shared = [directory]
    dist.broadcast_object_list(shared, src=0)
    directory = shared[0]
    model, optimizer = make(1, expert_mesh(2))
    model.train_steps(optimizer, 2)
    save_checkpoint(directory, 1, model, optimizer)
    state = values(model, optimizer)
    model.train_steps(optimizer, 1)

    def full_disk(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint_storage._ChecksumWriter, "write_data", full_disk)
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(directory, 2, model, optimizer)
        texts.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(os, "rename", full_disk)
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(directory, 2, model, optimizer)
        texts.append(str(caught.value))
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError if dist.get_rank() == 1 else RuntimeError) as refused:
        save_checkpoint(directory, 2, model, optimizer)
    texts.append(str(refused.value))
    model, optimizer = make(2, expert_mesh(2))
    assert load_checkpoint(directory, model, optimizer).step == 1
    assert_same(values(model, optimizer), state)
    return texts


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for writing, publishing, preparing in run_ranks(failing_worker, 2, tmp_path):
        assert "rank 1: OSError: [Errno 28] No space left on device" in writing
        assert "rank 0: OSError: [Errno 28] No space left on device" in publishing
        assert "has a parameter [3] that model does not name" in preparing


def one_sided_damage_worker(directory: Path) -> str:
    """One rank cannot read the index; every rank must say so."""
    model, optimizer = make(1, expert_mesh(2))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint_storage, "_INDEX", "other.json")
        with pytest.raises(ValueError) as caught:
            load_checkpoint(directory, model, optimizer)
    return str(caught.value)


def test_a_failed_load_on_one_rank_fails_on_all(saved_layouts: dict[Path, dict[str, Tensor]]) -> None:
    for text in run_ranks(one_sided_damage_worker, 2, next(iter(saved_layouts))):
        assert "other.json is damaged" in text


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "index.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(sealed(json.dumps({key: value for key, value in index.items() if key != "crc32"})))


def assert_refused(directory: Path, text: str) -> None:
    model, optimizer = make(3)
    before = values(model)
    with pytest.raises(ValueError, match=text) as caught:
        load_checkpoint(directory, model, optimizer)
    assert "the newest other whole one is step=1." in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not optimizer.state
    if "half loaded" not in str(caught.value):
        assert_same(values(model), before)
    load_checkpoint(directory, model, optimizer, step=1)
    assert_same(values(model), values(saved(directory.with_name("expected"), 1)[0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "run", 1, 2)
    return tmp_path / "run" / "iter_0000002"


def test_a_hostile_pickled_index_is_refused_and_runs_nothing(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    assert_refused(folder.parent, r"iter_0000002/\.metadata is damaged: it has \d+ bytes, and its index says")
    assert not marker.exists()


def test_a_pickled_index_is_never_unpickled(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    content = pickle.dumps(Hostile(marker))
    (folder / ".metadata").write_bytes(content)
    edit_index(folder, lambda index: index["files"].update({".metadata": len(content)}))
    assert_refused(folder.parent, r"iter_0000002/\.metadata is damaged: checksum differs")
    edit_index(folder, lambda index: index.update(metadata_crc32=zlib.crc32(content)))
    model, optimizer = make(3)
    load_checkpoint(folder.parent, model, optimizer)
    assert not marker.exists()


@pytest.mark.parametrize("container", ["pickle", "zip"])
def test_a_hostile_data_file_with_a_fitting_index_runs_nothing(folder: Path, tmp_path: Path, container: str) -> None:
    marker = tmp_path / "marker"
    file = folder / "__0_0.distcp"
    if container == "pickle":
        file.write_bytes(pickle.dumps(Hostile(marker)))
    else:
        torch.save(Hostile(marker), file)
    content = file.read_bytes() + bytes(1000)
    file.write_bytes(content)

    def fit(index: dict[str, Any]) -> None:
        index["files"][file.name] = len(content)
        index["tensors"] = {name: e for name, e in index["tensors"].items() if not name.startswith("rng.")}
        for entry in index["tensors"].values():
            for chunk in entry["chunks"]:
                chunk[2] = [file.name, 0, len(content), zlib.crc32(content), 0]

    edit_index(folder, fit)
    model, optimizer = make(3)
    load_checkpoint(folder.parent, model, optimizer)  # the bytes are values, whatever they mean elsewhere
    assert model.expert_bias.view(torch.uint8).tolist() == list(content[: model.expert_bias.nbytes])
    assert not marker.exists()


def archive_of(value: Any, compression: int) -> bytes:
    """Return what torch.save makes of a value, with 64 MiB of zeros compressed into its storage."""
    packed = io.BytesIO()
    with io.BytesIO() as plain, zipfile.ZipFile(packed, "w", compression) as archive:
        torch.save(value, plain)
        for name in zipfile.ZipFile(plain).namelist():
            is_storage = name.endswith("data/0") and compression == zipfile.ZIP_DEFLATED
            archive.writestr(name, bytes(64 << 20) if is_storage else zipfile.ZipFile(plain).read(name))
    return packed.getvalue()


class Inflating:
    def __reduce__(self) -> Any:
        return bytearray, (64 << 20,)


@pytest.mark.parametrize("kind", ["compressed storage", "bytearray"])
def test_an_archive_that_unpacks_to_much_is_not_unpacked(folder: Path, kind: str) -> None:
    content = archive_of(Inflating(), zipfile.ZIP_STORED)
    if kind == "compressed storage":
        content = archive_of(torch.zeros(8, 5), zipfile.ZIP_DEFLATED)
    file = folder / "__0_0.distcp"
    file.write_bytes(content)

    def fit(index: dict[str, Any]) -> None:
        index["files"][file.name] = len(content)
        index["tensors"] = {name: e for name, e in index["tensors"].items() if not name.startswith("rng.")}
        for entry in index["tensors"].values():
            for chunk in entry["chunks"]:
                chunk[2] = [file.name, 0, len(content), zlib.crc32(content), 0]

    edit_index(folder, fit)
    allocated = []
    real = torch.frombuffer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", None)
        patch.setattr(torch, "frombuffer", lambda b, **k: (allocated.append(len(b)), real(b, **k))[1])
        model, optimizer = make(3)
        if kind == "bytearray":
            load_checkpoint(folder.parent, model, optimizer)
        else:
            with pytest.raises(ValueError, match=r"index\.json is damaged: .* a chunk of \d+ bytes lies at 0 of \d+"):
                load_checkpoint(folder.parent, model, optimizer)
    assert max(allocated, default=0) <= len(content)


def test_another_tensor_in_place_of_the_right_one(folder: Path) -> None:
    def swap(index: dict[str, Any]) -> None:
        tensors = index["tensors"]
        tensors["model.router"]["chunks"][0][2][:3] = tensors["optimizer.router.exp_avg"]["chunks"][0][2][:3]

    edit_index(folder, swap)
    assert_refused(folder.parent, r"do not hold model.router \(checksum differs\)")


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def edit(index: dict[str, Any]) -> None:
        index["files"][name] = index["files"].pop("__0_0.distcp")
        for entry in index["tensors"].values():
            entry["chunks"][0][2][0] = name

    return edit


def set_router(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"]["model.router"].update({key: value})


def place_router(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(index: dict[str, Any]) -> None:
        index["tensors"]["model.router"]["chunks"][0][position] = value

    return edit


def cut_router(*boxes: list[list[int]]) -> Callable[[dict[str, Any]], None]:
    """Return an edit that cuts the router in chunks, all of them whole and in the file."""

    def edit(index: dict[str, Any]) -> None:
        entry = index["tensors"]["model.router"]
        name, start, num_bytes, crc32, data_start = entry["chunks"][0][2]
        entry["chunks"] = [[*box, [name, start, num_bytes, crc32, data_start]] for box in boxes]

    return edit


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (rename_file("../../x"), r"'\.\./\.\./x' is no file name"),
        (rename_file("/etc/hostname"), r"'/etc/hostname' is no file name"),
        (place_router(2, ["../../x", 0, 200, 0, 0]), r"KeyError: '\.\./\.\./x'"),
        (place_router(2, ["__0_0.distcp", -1, 200, 0, 0]), r"a chunk lies at -1 \+ 200"),
        (place_router(2, ["__0_0.distcp", 0, 1 << 50, 0, 0]), r"a chunk of 160 bytes lies at 0 of 1125899906842624"),
        (place_router(2, ["__0_0.distcp", 0]), "TypeError"),
        (place_router(0, [-1, 0]), r"a chunk of model.router \[8, 5\] lies at \[-1, 0\]"),
        (place_router(1, [7, 5]), r"the chunks of model.router do not cover its shape \[8, 5\]"),
        (place_router(2, ["__0_0.distcp", 1 << 40, 200, 0, 0]), r"a chunk lies at 1099511627776 \+ 200"),
        (place_router(2, ["__0_0.distcp", 0, 200, 0, 41]), r"a chunk of 160 bytes lies at 41 of 200"),
        (place_router(2, ["__0_0.distcp", 0, 200, 0, -1]), r"a chunk of 160 bytes lies at -1 of 200"),
        (place_router(2, ["__0_0.distcp", 0, 200, 0, math.nan]), r"a chunk lies at .*nan"),
        (place_router(2, ["__0_0.distcp", 0.0, 200, 0, 0]), r"a chunk lies at .*0\.0"),
        (cut_router([[0, 0], [4, 5]], [[2, 0], [4, 5]]), r"two chunks of model.router overlap at 2 of dimension 0"),
        (cut_router([[0, 0], [4, 5]], [[0, 0], [4, 5]]), r"model.router has two chunks at \[0, 0\]"),
        (cut_router([[0, 0], [8, 3]], [[0, 2], [8, 2]]), r"two chunks of model.router overlap at 2 of dimension 1"),
        (set_router("shape", [1 << 62, 1 << 62]), r"the chunks of model.router do not cover its shape"),
        (set_router("shape", [1 << 70, 5]), r"(OverflowError|the chunks of model.router do not cover)"),
        (lambda index: index.update(files=[".metadata"], tensors={}), "ValueError"),
        (lambda index: index["files"].pop(".metadata"), r"it does not list \.metadata"),
        (lambda index: index.update(tensors=[1]), "AttributeError"),
        (set_router("chunks", []), r"the chunks of model.router do not cover its shape \[8, 5\]"),
        (set_router("dtype", "load"), "model.router has the dtype 'load'"),
        (set_router("dtype", "onnx.export"), "KeyError: 'onnx.export'"),
        (set_router("shape", ["a"]), "TypeError"),
        (lambda index: index.pop("files"), "KeyError: 'files'"),
        (lambda index: index.update(files=None), "TypeError"),
    ],
)
def test_a_hostile_index_is_refused(folder: Path, edit: Callable[[dict[str, Any]], None], text: str) -> None:
    edit_index(folder, edit)
    assert_refused(folder.parent, rf"iter_0000002/index\.json is damaged: .*{text}")


@pytest.mark.parametrize("name", ["index.json", "meta.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("left", ["half", "nothing", "no file"])
def test_a_truncated_file_is_named_and_another_checkpoint_offered(folder: Path, name: str, left: str) -> None:
    file = folder / name
    content = file.read_bytes()
    if left == "no file":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if left == "half" else b"")
    assert_refused(folder.parent, rf"iter_0000002/{name.replace('.', '[.]')} is damaged")


def test_a_flipped_bit_is_found(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    _, start, num_bytes, _, _ = index["tensors"]["model.router"]["chunks"][0][2]
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[start + num_bytes // 2] ^= 1
    file.write_bytes(content)
    assert_refused(folder.parent, r"__0_0.distcp is damaged: .* do not hold model.router \(checksum differs\).*half")


def test_the_offer_skips_damaged_checkpoints(folder: Path) -> None:
    (folder.parent / "iter_0000001" / "__0_0.distcp").write_bytes(b"")
    (folder / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match="no other whole checkpoint is there"):
        load_checkpoint(folder.parent, make(3)[0])


def test_a_format_of_the_future_is_refused(folder: Path) -> None:
    file = folder / "meta.json"
    file.write_text(file.read_text().replace('"format_version": 2', '"format_version": 3'))
    assert_refused(folder.parent, "meta.json has format_version 3, and this release reads 2")


@pytest.mark.parametrize("name", ["meta.json", "index.json", "__0_0.distcp", ".metadata"])
def test_flipped_bits_anywhere_are_found(folder: Path, name: str) -> None:
    file = folder / name
    content = file.read_bytes()
    positions = random.Random(0).sample(range(8 * len(content)), 120)
    for position in (*positions, 0, 8 * len(content) - 1):
        damaged = bytearray(content)
        damaged[position // 8] ^= 1 << position % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name} (is damaged|has format_version).* newest other .* is step=1"):
            load_checkpoint(folder.parent, *make(3))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": 3}, "TypeError"),
        ({"optimizer": {"class": "AdamW"}}, "KeyError: 'groups'"),
        ({"optimizer": {"class": ["AdamW"], "groups": []}}, "class is no name"),
        ({"optimizer": {"class": "AdamW", "groups": 3}}, "TypeError"),
        ({"optimizer": {"class": "AdamW", "groups": [{"params": [["a"]], "options": {}}]}}, "no list of names"),
        ({"optimizer": {"class": "AdamW", "groups": [{"params": [], "options": []}]}}, "AttributeError"),
        ({"optimizer": {"class": "AdamW", "groups": [{"params": [], "options": {"params": []}}]}}, "name its param"),
        ({"step": "../x"}, "step must be a whole number"),
        ({"step": True}, "step must be a whole number"),
        ({"extra": None}, "extra an object"),
    ],
)
def test_a_hostile_meta_file_is_refused(folder: Path, changes: dict[str, Any], text: str) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["crc32"]
    (folder / "meta.json").write_text(sealed(json.dumps(meta | changes)))
    assert_refused(folder.parent, rf"iter_0000002/meta\.json is damaged: .*{text}")


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "x"), ("lr", None), ("lr", True), ("betas", [0.1]), ("betas", ["a", 1]), ("amsgrad", 1)],
)
def test_options_of_another_kind_are_refused(folder: Path, option: str, value: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["crc32"]
    meta["optimizer"]["groups"][0]["options"][option] = value
    (folder / "meta.json").write_text(sealed(json.dumps(meta)))
    model, optimizer = make(3)
    before = values(model)
    with pytest.raises(ValueError, match=rf"iter_0000002 holds {option} .*, and AdamW has"):
        load_checkpoint(folder.parent, model, optimizer)
    assert_same(values(model), before)
    assert optimizer.param_groups[0]["lr"] == 0.01


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def sparse(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(1 << 42)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def link_to_zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def nested(file: Path) -> None:
    file.write_text("[" * 200_000)


@pytest.mark.parametrize("name", ["meta.json", "index.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", [pipe, sparse, link, link_to_zeros, nested])
def test_what_is_no_file_of_its_size_is_not_read(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    assert_refused(folder.parent, rf"iter_0000002/{name.replace('.', '[.]')} is damaged")


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 99, b"9" * 30, b"-1", b"2\0", b"2" * (1 << 20), pipe, sparse, link_to_zeros]
)
def test_garbage_in_the_latest_iteration_file(folder: Path, content: Any) -> None:
    file = folder.parent / LATEST
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    with pytest.raises(ValueError, match=rf"{LATEST} holds .*, not a step; pass step=, one of \[1, 2\]"):
        load_checkpoint(folder.parent, *make(3))


def test_a_transposed_parameter_comes_back(tmp_path: Path) -> None:
    model, _ = make(1)
    model.router = nn.Parameter(model.random(HIDDEN, NUM_EXPERTS).t())
    save_checkpoint(tmp_path, 1, model)
    other, _ = make(2)
    load_checkpoint(tmp_path, other)
    assert_same(values(other), values(model))


def test_a_random_state_that_is_none_is_told(folder: Path) -> None:
    model, optimizer = make(2)
    model.train_steps(optimizer, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: torch.zeros(7, dtype=torch.uint8))
        save_checkpoint(folder.parent, 9, model, optimizer)
    with pytest.raises(ValueError, match=r"loading .*iter_0000009 failed on 1 of 1 ranks. rank 0: (Runtime|Type)Error"):
        load_checkpoint(folder.parent, *make(1))
    assert load_checkpoint(folder.parent, make(1)[0]).step == 9
