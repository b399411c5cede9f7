"""A run that changes its layout at every checkpoint, with its optimizer, equals one that never stopped.

The run trains one step on each factoring of 4, 2 and 1 ranks in turn, saves, and goes on from that file on the next.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import (
    MoEGPT,
    ProcessGroups,
    apply_fsdp,
    clip_grad_norm,
    finalize_gradients,
    load_checkpoint,
    save_checkpoint,
    update_expert_bias,
)
from moe.parallel import split_by_mesh
from tests.distributed.test_factorings import CONFIG, FACTORINGS, OBJECTIVES, Factoring, global_batch, whole
from tests.ranks import run_ranks
from tests.tolerances import assert_close

ONE_RANK = Factoring(1, 1, 1, 1, False)
CONFIGURATION = replace(CONFIG, **OBJECTIVES["sequence loss, z-loss"])


class Run:
    """A model in one layout, with its optimizer, and the number of steps it was trained."""

    def __init__(self, factoring: Factoring | None) -> None:
        torch.manual_seed(5 if factoring is None else 77)  # what a checkpoint does not overwrite would show
        self.groups = ProcessGroups.build()
        if factoring is not None:
            self.groups = ProcessGroups.build(factoring.ep, factoring.etp, factoring.tp)
        self.model = MoEGPT(CONFIGURATION, self.groups)
        if factoring is not None and factoring.fsdp:
            apply_fsdp(self.model, self.groups)
        param_groups = [{"params": parameters} for parameters in split_by_mesh(self.model.parameters())]
        self.optimizer = torch.optim.AdamW(param_groups, lr=0.03, weight_decay=0.1)
        self.step = 0

    def train(self) -> None:
        tokens, labels, _ = global_batch(self.step % 5)
        size, rank = self.groups.dp.size(), self.groups.dp.rank()
        self.model.zero_grad()
        self.model(tokens.chunk(size)[rank], labels.chunk(size)[rank]).backward()
        finalize_gradients(self.model, self.groups)
        clip_grad_norm(self.model, 0.5, self.groups)
        self.optimizer.step()
        update_expert_bias(self.model, self.groups)
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        found = {name: whole(tensor) for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{name}: {key}": whole(v) for key, v in self.optimizer.state[parameter].items()}
        return found


def leg_worker(factorings: list[Factoring], folder: str) -> None:
    """Load the latest checkpoint, train a step, save: once in each of these layouts of the same ranks."""
    for factoring in factorings:
        run = Run(factoring)
        run.step = load_checkpoint(folder, run.model, run.optimizer).step
        run.train()
        save_checkpoint(folder, run.step, run.model, run.optimizer)


def travel(route: list[Factoring], folder: Path) -> None:
    """Start on one rank, take the route, and compare with a run that stayed."""
    stayed = Run(None)
    stayed.train()
    save_checkpoint(folder, 1, stayed.model, stayed.optimizer)
    legs: list[list[Factoring]] = []
    for factoring in route:  # layouts of as many ranks share their processes
        if not legs or legs[-1][0].world != factoring.world:
            legs.append([])
        legs[-1].append(factoring)
    for leg in legs:
        run_ranks(leg_worker, leg[0].world, leg, str(folder))
    arrived = Run(ONE_RANK)
    assert load_checkpoint(folder, arrived.model, arrived.optimizer).step == 1 + len(route)
    for _ in route:
        stayed.train()
    expected = stayed.state()
    assert any(name.endswith("exp_avg_sq") for name in expected)
    assert sum(name.endswith("expert_bias") for name in expected) == 2
    for name, value in arrived.state().items():
        assert_close(value, expected[name], what=name)


# 4, 2 and 1 ranks, TP, EP, ETP, FSDP on and off, each loaded from one that differs in most of them
ROUTE = [
    Factoring(4, 2, 1, 2, True),
    Factoring(4, 1, 4, 1, False),
    Factoring(4, 4, 1, 1, True),
    Factoring(4, 1, 2, 2, True),
    Factoring(2, 2, 1, 1, False),
    Factoring(2, 1, 2, 1, True),
    ONE_RANK,
    Factoring(4, 2, 2, 1, False),
    Factoring(4, 1, 1, 1, True),
]


def test_a_run_goes_on_over_changing_layouts(tmp_path: Path) -> None:
    travel(ROUTE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_run_goes_on_over_every_layout(seed: int, tmp_path: Path) -> None:
    """Each layout reads what another wrote, and its own file is read by a third."""
    route = [*FACTORINGS, ONE_RANK]
    random.Random(seed).shuffle(route)
    for start in range(0, len(route), 8):  # in parts: rounding grows with every step of training
        travel(route[start : start + 8], tmp_path / str(start))


@pytest.mark.slow
def test_every_layout_reads_every_layout(tmp_path: Path) -> None:
    """All pairs of layouts of 4 ranks."""
    assert sum(run_ranks(pairs_worker, 4, str(tmp_path), timeout_s=1500.0)[0].values()) == len(FOUR) ** 2


FOUR = [factoring for factoring in FACTORINGS if factoring.world == 4]


def pairs_worker(folder: str) -> dict[str, int]:
    """Write a checkpoint in each layout, and load each in every other: weights and optimizer are those of one rank."""
    expected, counts = None, {}
    for writer in FOUR:
        torch.manual_seed(5)
        run = Run(writer)
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        run.optimizer.step()
        save_checkpoint(f"{folder}/{writer}", 1, run.model, run.optimizer)
        expected = expected or run.state()
    for reader in FOUR:
        run = Run(reader)
        for writer in FOUR:
            for tensor in run.model.state_dict().values():
                tensor.zero_()
            load_checkpoint(f"{folder}/{writer}", run.model, run.optimizer)
            found = run.state()
            assert found.keys() == expected.keys()
            differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
            assert differing == [], (str(writer), str(reader))
            counts[str(reader)] = counts.get(str(reader), 0) + 1
    dist.barrier()
    return counts
