"""Asynchronous saves: what they hold, how they fail, what they leave; random states and the caller's tensors."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe import AsyncCheckpointer, MoEConfig, MoELayer, RoutingRecords, checkpoint_async
from moe.checkpoint import finish_save, latest_step, load_checkpoint, save_checkpoint
from tests.moe.test_checkpoint import assert_same, expert_mesh, make, names_in, values
from tests.moe.test_layer import live_tensors
from tests.ranks import run_ranks


class Gate:
    """Holds the writing threads until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def finish(self, save: Any, group: Any = None) -> None:
        assert self.opened.wait(20)
        finish_save(save, group)


def changed_worker(directory: Path) -> None:
    """Weights change in place, and training's collectives run, while threads write."""
    model, optimizer = make(3, expert_mesh(2))
    model.train_steps(optimizer, 2)
    gate = Gate()
    with AsyncCheckpointer() as checkpointer, mock.patch.object(checkpoint_async, "finish_save", gate.finish):
        for step in (1, 2):
            expected = values(model, optimizer)
            folder = checkpointer.save(directory, step, model, optimizer, extra={"step": step})
            assert checkpointer.is_saving
            assert not folder.exists()
            gate.opened.set() if step == 2 else None
            for turn in range(20):
                model.train_steps(optimizer, 1)
                total = torch.tensor([turn + dist.get_rank()])
                dist.all_reduce(total)
                assert total.item() == 2 * turn + 1
            gate.opened.set()
            checkpointer.wait()
            assert not checkpointer.is_saving
            fresh = make(9, expert_mesh(2))
            loaded = load_checkpoint(directory, *fresh)
            assert (loaded.path, loaded.extra) == (folder, {"step": step})
            assert_same(values(*fresh), expected)
            dist.barrier()
            gate.opened.clear()


def test_a_save_holds_the_state_of_its_call(tmp_path: Path) -> None:
    run_ranks(changed_worker, 2, tmp_path)


def failing_worker(directory: Path) -> None:
    """Rank 1 cannot write: every rank is told at the next call, and the checkpoint before stays."""
    model, optimizer = make(3, expert_mesh(2))
    model.train_steps(optimizer, 1)

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with AsyncCheckpointer(timedelta(seconds=20)) as checkpointer:
        checkpointer.save(directory, 1, model, optimizer)
        checkpointer.wait()
        broken = mock.patch("moe.checkpoint_storage.FileSystemWriter.write_data", full_disk)
        for again in (lambda: checkpointer.wait(), lambda: checkpointer.save(directory, 3, model, optimizer)):
            with broken if dist.get_rank() == 1 else mock.MagicMock():
                checkpointer.save(directory, 2, model, optimizer)
                while checkpointer.is_saving:
                    pass
            with pytest.raises(RuntimeError, match=r"writing .*iter_0000002 failed on \d of 2 ranks.*No space left"):
                again()
        assert latest_step(directory) == 1
        checkpointer.save(directory, 4, model, optimizer)
    assert latest_step(directory) == 4
    assert names_in(directory) == {"iter_0000001", "iter_0000004", "latest_checkpointed_iteration.txt"}
    load_checkpoint(directory, *make(9, expert_mesh(2)))


def test_what_goes_wrong_in_a_thread_is_raised_on_every_rank(tmp_path: Path) -> None:
    run_ranks(failing_worker, 2, tmp_path)


def test_the_next_save_waits_and_one_process_needs_no_group(tmp_path: Path) -> None:
    gate, (model, _) = Gate(), make(3)
    with mock.patch.object(checkpoint_async, "finish_save", gate.finish):
        checkpointer = AsyncCheckpointer()
        checkpointer.save(tmp_path, 1, model, keep_last=1)
        assert latest_step(tmp_path) is None
        threading.Timer(0.2, gate.opened.set).start()
        checkpointer.save(tmp_path, 2, model, keep_last=1)  # waits for the first one
        assert latest_step(tmp_path) is not None
        with pytest.raises(ValueError, match=r"keep_last \(0\) must be at least 1"):
            checkpointer.save(tmp_path, 3, model, keep_last=0)
        checkpointer.close()
    assert names_in(tmp_path) == {"iter_0000002", "latest_checkpointed_iteration.txt"}
    with pytest.raises(ValueError, match=r"this AsyncCheckpointer is closed"):
        checkpointer.save(tmp_path, 3, model)


def test_a_block_that_raises_does_not_wait_for_peers(tmp_path: Path) -> None:
    gate, (model, _) = Gate(), make(3)
    with mock.patch.object(checkpoint_async, "finish_save", gate.finish):
        checkpointer = AsyncCheckpointer()
        checkpointer.save(tmp_path, 1, model)
        with pytest.raises(ZeroDivisionError), checkpointer:
            raise ZeroDivisionError
        assert checkpointer.is_saving
        gate.opened.set()
        checkpointer.close()


def test_copies_take_no_more_memory_with_every_save(tmp_path: Path) -> None:
    model, optimizer = make(3)
    live = []
    with AsyncCheckpointer() as checkpointer:
        for step in range(1, 7):
            model.train_steps(optimizer, 1)
            checkpointer.save(tmp_path, step, model, optimizer)
            checkpointer.wait()
            if step in (3, 6):
                live.append(live_tensors())
    assert live[0] == live[1]


def random_worker(directory: Path, is_saving: bool) -> list[float]:
    torch.manual_seed((100 if is_saving else 500) + dist.get_rank())
    model, optimizer = make(3)
    model.train_steps(optimizer, 1)
    if is_saving:
        save_checkpoint(directory, 1, model, optimizer, tensors={f"rank {dist.get_rank()}": torch.arange(3)})
    else:
        loaded = load_checkpoint(directory, model, optimizer)
        assert loaded.tensors.keys() == {"rank 0", "rank 1"}
        assert all(torch.equal(tensor, torch.arange(3)) for tensor in loaded.tensors.values())
    return torch.rand(5).tolist()


def test_random_states_come_back_where_as_many_ranks_go_on(tmp_path: Path) -> None:
    drawn = run_ranks(random_worker, 2, tmp_path, True)
    assert drawn[0] != drawn[1]
    assert run_ranks(random_worker, 2, tmp_path, False) == drawn
    (alone,) = run_ranks(random_worker, 1, tmp_path, False)
    assert alone not in drawn
    state = torch.get_rng_state()
    load_checkpoint(tmp_path, make(3)[0])  # a model alone: nothing goes on
    assert torch.equal(torch.get_rng_state(), state)


def test_routing_records_travel_with_a_checkpoint(tmp_path: Path) -> None:
    layer = MoELayer(MoEConfig(hidden_size=6, num_moe_experts=4, moe_ffn_hidden_size=3))
    hidden, records = torch.randn(5, 1, 6), RoutingRecords()
    with records.record(layer):
        expected = layer(hidden)
    save_checkpoint(tmp_path, 1, layer, tensors={f"routing/{name}": records.get(name, n) for name, n in records})
    restored = RoutingRecords()
    for name, ids in load_checkpoint(tmp_path, layer).tensors.items():
        restored.set(name.removeprefix("routing/"), ids)
    with restored.replay(layer):
        assert torch.equal(layer(hidden), expected)


def broken_copy_worker(directory: Path) -> None:
    """A copy that fails on one rank is told on all, and nobody waits."""
    model, optimizer = make(3, expert_mesh(2))
    model.train_steps(optimizer, 1)
    with AsyncCheckpointer(timedelta(seconds=20)) as checkpointer:
        no_memory = mock.patch.object(checkpointer, "_copy", side_effect=MemoryError("no memory"))
        with (
            no_memory if dist.get_rank() == 0 else mock.MagicMock(),
            pytest.raises(RuntimeError, match=r"preparing .* failed on 1 of 2 ranks. rank 0: MemoryError"),
        ):
            checkpointer.save(directory, 1, model, optimizer)
        checkpointer.save(directory, 2, model, optimizer)
    assert latest_step(directory) == 2


def test_a_copy_that_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    run_ranks(broken_copy_worker, 2, tmp_path)


def test_views_that_negate_or_conjugate_keep_their_values(tmp_path: Path) -> None:
    given = {"neg": torch.ones(2)._neg_view(), "conj": torch.tensor([1 + 2j]).conj()}
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(tmp_path, 1, make(3)[0], tensors=given)
    for name, tensor in load_checkpoint(tmp_path, make(4)[0]).tensors.items():
        assert torch.equal(tensor, given[name]), name


def test_what_is_no_tensor_belongs_into_extra(tmp_path: Path) -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(ValueError, match=r"tensors\['x'\] is on the meta device, sparse or quantized"):
            save_checkpoint(tmp_path, 1, make(3)[0], tensors={"x": tensor})
    with pytest.raises(ValueError, match=r"tensors\['seed'\] is a int; extra takes what is no tensor"):
        save_checkpoint(tmp_path, 1, make(3)[0], tensors={"seed": 5})
    assert names_in(tmp_path) == set()
