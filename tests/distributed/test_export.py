"""Safetensors export on several ranks: read by the library alone it is the one-rank model, as is what ranks import."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moe.export
from moe import MoEGPT, MoELayer, ProcessGroups, apply_fsdp, export_safetensors, import_safetensors
from moe.parallel import local_tensor
from tests.distributed.test_factorings import BIASED, CONFIG, Factoring, whole
from tests.distributed.test_quantized import RECIPES, build
from tests.moe.test_export import assert_bits, read_all, values
from tests.ranks import run_ranks

MODELS = {
    "bf16": replace(CONFIG, **BIASED, params_dtype=torch.bfloat16, moe_router_dtype="fp32"),
    "few experts": replace(CONFIG, num_moe_experts=2, hidden_size=18, num_attention_heads=2, num_query_groups=2),
}
LAYOUTS = {
    4: [
        Factoring(4, 1, 2, 2, False),
        Factoring(4, 2, 2, 1, True),  # experts over EP and EDP, attention over TP and DP
        Factoring(4, 1, 1, 1, True),
        Factoring(4, 2, 1, 2, True),
    ],
    2: [Factoring(2, 2, 1, 1, False), Factoring(2, 1, 1, 1, True)],
}


def make(model: str, factoring: Factoring | None = None) -> MoEGPT:
    """Return a model whose values are all random."""
    torch.manual_seed(5 if factoring is None else 77)
    groups = None if factoring is None else ProcessGroups.build(factoring.ep, factoring.etp, factoring.tp)
    made = MoEGPT(MODELS[model], groups)
    if factoring is None:
        for tensor in made.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 50)
    elif factoring.fsdp:
        assert groups is not None
        apply_fsdp(made, groups)
    return made


def round_trip_worker(root: Path, layouts: list[Factoring], expected: dict[str, dict[str, Tensor]]) -> int:
    """Import what one rank exported, and export it again, in each layout."""
    count = 0
    for factoring in layouts:
        for name, state in expected.items():
            model = make(name, factoring)
            with counted_reads() as num_read:
                import_safetensors(model, root / name)
            assert sum(num_read) == sum(local_tensor(tensor).numel() for tensor in model.state_dict().values())
            assert_bits({key: whole(tensor) for key, tensor in model.state_dict().items()}, state)
            export_safetensors(model, root / f"{name}, {factoring}", max_shard_bytes=20_000)
            count += 1
    return count


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Collect the number of elements of everything that is read from files."""
    num_read: list[int] = []
    opened = moe.export._opened

    class Part:
        def __init__(self, part: Any) -> None:
            self.part = part
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

        def __getitem__(self, box: Any) -> Tensor:
            values: Tensor = self.part[box]
            num_read.append(values.numel())
            return values

    class File:
        def __init__(self, file: Any) -> None:
            self.file = file
            self.keys = file.keys

        def get_slice(self, name: str) -> Part:
            return Part(self.file.get_slice(name))

        def get_tensor(self, name: str) -> Tensor:
            values: Tensor = self.file.get_tensor(name)
            num_read.append(values.numel())
            return values

    @contextmanager
    def counting(file: Path) -> Iterator[File]:
        with opened(file) as found:
            yield File(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe.export, "_opened", counting)
        yield num_read


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_exports_and_imports_the_one_rank_model(world_size: int, tmp_path: Path) -> None:
    expected = {}
    for name in MODELS:
        model = make(name)
        export_safetensors(model, tmp_path / name)
        expected[name] = values(model)
    layouts = LAYOUTS[world_size]
    assert run_ranks(round_trip_worker, world_size, tmp_path, layouts, expected)[0] == len(layouts) * len(MODELS)
    for name, state in expected.items():
        for factoring in layouts:
            assert_bits(read_all(tmp_path / f"{name}, {factoring}"), state)
            assert len(list((tmp_path / f"{name}, {factoring}").glob("*.safetensors"))) > 1


def quantized(groups: ProcessGroups | None, seed: int) -> MoELayer:
    layer = build(groups, **RECIPES["blockwise"], fp8_param=True)
    generator = torch.Generator().manual_seed(seed)
    for tensor in layer.state_dict().values():
        local = local_tensor(tensor)
        local.copy_(torch.randn(local.shape, generator=generator))
    return layer


def fp8_worker(root: Path, ep: int, etp: int) -> None:
    layer = quantized(ProcessGroups.build(ep, etp), dist.get_rank())
    import_safetensors(layer, root / "one")
    found = layer.state_dict()
    assert len({tensor.dtype for tensor in found.values()}) == 3
    for name in ("experts.linear_fc1.weight", "experts.linear_fc2.weight"):
        assert found[name].dtype == torch.float8_e4m3fn
        assert local_tensor(found[name]).numel() * ep * etp == found[name].numel()
    export_safetensors(layer, root / "ranks")


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (2, 2)])
def test_fp8_weights_cross_ranks(ep: int, etp: int, tmp_path: Path) -> None:
    layer = quantized(None, 9)
    export_safetensors(layer, tmp_path / "one")
    run_ranks(fp8_worker, ep * etp, tmp_path, ep, etp)
    assert_bits(read_all(tmp_path / "ranks"), values(layer))


def failing_worker(root: Path) -> list[str]:
    """Writing fails on rank 0 at the first file, a file is damaged, and a rank builds another model."""
    model = make("bf16", Factoring(2, 2, 1, 1, False))

    def full_disk(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RuntimeError) as caught:
            export_safetensors(model, root, max_shard_bytes=20_000)
        texts.append(str(caught.value))
    export_safetensors(model, root, max_shard_bytes=20_000)
    with pytest.raises(ValueError) as refused:
        export_safetensors(model, root)
    texts.append(str(refused.value))
    before = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    dist.barrier()
    if dist.get_rank() == 0:
        file = sorted(root.glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(ValueError) as damaged:
        import_safetensors(model, root)
    texts.append(str(damaged.value))
    other = nn.Linear(1, 1) if dist.get_rank() == 1 else model
    with pytest.raises(ValueError):
        import_safetensors(other, root)
    assert_bits({name: whole(tensor) for name, tensor in model.state_dict().items()}, before)
    return texts


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for writing, taken, damaged in run_ranks(failing_worker, 2, tmp_path):
        assert "rank 0: OSError: [Errno 28] No space left on device" in writing
        assert "model.safetensors.index.json is there already" in taken
        assert ".safetensors is damaged: " in damaged
