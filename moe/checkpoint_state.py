"""Model and optimizer as one flat dict of tensors by name, and as hyper-parameters in JSON.

model.<name in model.state_dict()>
optimizer.<parameter's name in model>.<key of the optimizer's state>
tensors.<name that the caller gave>
rng.<number of ranks>.<rank>.<cpu or cuda>
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MASTER = "master_param"  # key of a master weight among the states of its weight
_NUM_LISTED = 10
# How an optimizer runs its step belongs to the run that loads, not to the run that saved.
_EXECUTION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's tensors by name; they share memory with the model."""
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            kind = "on the meta device" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {kind}, and a checkpoint holds real tensors alone: materialise or drop it.")
    return state


def rng_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators of this rank, by name: [bytes] uint8."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    prefix = _rng_prefix()
    return {f"{prefix}{device}": state for device, state in states.items()}


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Restore what `rng_state` returned on this rank of as many ranks; without such a state nothing happens."""
    for name, state in states.items():
        if name == f"{_rng_prefix()}cpu":
            torch.set_rng_state(state)
        elif name == f"{_rng_prefix()}cuda" and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state)


def _rng_prefix() -> str:
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return f"rng.{size}.{rank}."


def caller_tensors(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the caller's tensors by their name in a checkpoint.

    Raises:
        ValueError: something else than a dense tensor.
    """
    found = {}
    for name, value in (tensors or {}).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"tensors[{name!r}] is a {type(value).__name__}; extra takes what is no tensor.")
        if value.is_meta or value.is_quantized or value.layout != torch.strided:
            raise ValueError(f"tensors[{name!r}] is on the meta device, sparse or quantized; make it dense.")
        found[f"tensors.{name}"] = value.detach().resolve_conj().resolve_neg()
    return found


def empty_tensors(saved: Mapping[str, "TensorStorageMetadata"], *, is_resumed: bool) -> dict[str, Tensor]:
    """Return zeros on the host for the caller's tensors, and for this rank's random generators where a run goes on."""
    prefix = _rng_prefix()
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith("tensors.") or (is_resumed and name.startswith(prefix))
    }


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Return the model's name for each parameter, after checking that it has one for all of the optimizer's."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            primary = getattr(parameter, "primary_weight", None)
            if primary in names:
                names[parameter] = names[primary]
            if parameter not in names:
                shape = list(parameter.shape)
                raise ValueError(f"param_groups[{position}] has a parameter {shape} that model does not name: drop it.")
    return names


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the optimizer's tensors by name; they share memory with the optimizer."""
    if optimizer is None:
        return {}
    names = parameter_names(model, optimizer)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optimizer.{names[parameter]}.{key}"
            if not isinstance(value, Tensor) or "." in key:
                raise ValueError(f"{name} is a {type(value).__name__}; optimizer state must be tensors, keys dot-free.")
            _check_slot(name, value.shape, parameter)
    return named_slots(names, optimizer.state) | master_weights(names, optimizer)


def master_weights(names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the masters of weights that are stored quantized, by name; they share memory with the optimizer's."""
    masters = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "primary_weight")]
    return {f"optimizer.{names[p]}.{MASTER}": p.detach() for p in masters}


def named_slots(names: Mapping[Tensor, str], slots: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Flatten state by parameter and key to state by name."""
    return {f"optimizer.{names[p]}.{key}": value for p, state in slots.items() for key, value in state.items()}


def _check_slot(name: str, shape: torch.Size, parameter: Tensor) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor) and len(shape) > 0 and shape != parameter.shape:
        raise ValueError(
            f"{name} {list(shape)} belongs to a sharded parameter {list(parameter.shape)}: only scalars and states of "
            "the parameter's shape can be resharded; use another optimizer."
        )


def empty_slots(
    names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer, saved: Mapping[str, "TensorStorageMetadata"]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return zeros for each saved state of a parameter that the optimizer holds, laid out as the optimizer would."""
    owners = {names[p]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    slots: dict[Tensor, dict[str, Tensor]] = {}
    for name, entry in saved.items():
        owner_name, _, key = name.removeprefix("optimizer.").rpartition(".")
        if not name.startswith("optimizer.") or owner_name not in owners or key == MASTER:
            continue
        parameter, group = owners[owner_name]
        _check_slot(name, entry.size, parameter)
        dtype = entry.properties.dtype
        if key == "step":  # on the CPU, unless the kernel that runs the step reads it
            on_device = group.get("capturable") or group.get("fused")
            slot = torch.zeros(entry.size, dtype=dtype, device=parameter.device if on_device else "cpu")
        elif entry.size == parameter.shape:
            slot = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            slot = torch.zeros(entry.size, dtype=dtype, device=parameter.device)
        slots.setdefault(parameter, {})[key] = slot
    return slots


def check_targets(folder: Path, saved: Mapping[str, "TensorStorageMetadata"], targets: Mapping[str, Tensor]) -> None:
    """Raise a ValueError that lists every tensor that is missing, unexpected, or of another shape or dtype."""
    differing = [
        f"{name} (saved {saved[name].properties.dtype} {list(saved[name].size)}, here {t.dtype} {list(t.shape)})"
        for name, t in targets.items()
        if name in saved and (saved[name].properties.dtype, saved[name].size) != (t.dtype, t.shape)
    ]
    _raise_if_any(
        folder,
        {
            "missing in the checkpoint": targets.keys() - saved.keys(),
            "unexpected in the checkpoint": saved.keys() - targets.keys(),
            "differing in shape or dtype": differing,
        },
    )


def _raise_if_any(folder: Path, faults: Mapping[str, Iterable[str]]) -> None:
    parts = []
    for fault, names in faults.items():
        listed = sorted(names)
        if listed:
            more = ", ..." if len(listed) > _NUM_LISTED else ""
            parts.append(f"{len(listed)} {fault}: {', '.join(listed[:_NUM_LISTED])}{more}")
    if parts:
        raise ValueError(f"{folder} does not fit model and optimizer. {'; '.join(parts)}.")


def hyper_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return, group by group, the names of the parameters and the options that JSON can hold."""
    names = parameter_names(model, optimizer)
    groups = []
    for group in optimizer.param_groups:
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(
            {
                "params": [names[parameter] for parameter in group["params"]],
                "options": {key: value for key, value in options.items() if _is_json(value)},
            }
        )
    return {"class": type(optimizer).__name__, "groups": groups}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value  # sync: a learning rate


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def check_options(saved: Any) -> None:
    """Raise unless the value, read from JSON, is what `hyper_parameters` returns, or None."""
    if saved is None:
        return
    if not isinstance(saved["class"], str):
        raise ValueError("the optimizer's class is no name")
    for group in saved["groups"]:
        names, options = group["params"], group["options"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("the parameters of a group are no list of names")
        if options.keys() & {"params", "param_names"}:
            raise ValueError("the options of a group name its parameters")


def saved_options(
    folder: Path, saved: dict[str, Any] | None, names: Mapping[Tensor, str], optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return the options to restore for each parameter group of `optimizer`.

    Groups may be cut otherwise than the saved ones (by DTensor or not, which depends on the layout of ranks).

    Raises:
        ValueError: another class, other parameters, a group whose parameters were saved with different options, or an
            option of another kind than the optimizer's.
    """
    kind = type(optimizer).__name__
    if saved is None or saved["class"] != kind:
        found = "no optimizer" if saved is None else f"the state of {saved['class']}"
        raise ValueError(f"{folder} holds {found}, not of {kind}; pass optimizer=None to load the model alone.")
    by_name: dict[str, dict[str, Any]] = {}
    for saved_group in saved["groups"]:
        options = {key: value for key, value in saved_group["options"].items() if key not in _EXECUTION_OPTIONS}
        by_name |= dict.fromkeys(saved_group["params"], options)
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    here = {name for group in groups for name in group}
    faults = {
        "missing in the saved optimizer": here - by_name.keys(),
        "unexpected in the saved optimizer": by_name.keys() - here,
    }
    _raise_if_any(folder, faults)
    for position, group in enumerate(groups):
        for name in group:
            if by_name[name] != by_name[group[0]]:
                raise ValueError(
                    f"{folder} holds different options for {group[0]} and {name}, "
                    f"and param_groups[{position}] has both: put them in two groups, or pass optimizer=None."
                )
    restored = [by_name[group[0]] if group else {} for group in groups]
    for chosen, here_group in zip(restored, optimizer.param_groups, strict=True):
        for key, value in chosen.items():
            if not _is_same_kind(value, here_group.get(key)):
                raise ValueError(f"{folder} holds {key} {str(value)[:40]!r}, and {kind} has {here_group[key]!r}.")
    return restored


def _is_same_kind(saved: Any, here: Any) -> bool:
    """Whether an option from JSON can take the place of the optimizer's."""
    if isinstance(here, tuple):
        return isinstance(saved, list) and len(saved) == len(here) and all(map(_is_same_kind, saved, here))
    if isinstance(here, bool):
        return isinstance(saved, bool)
    is_number = isinstance(saved, int | float) and not isinstance(saved, bool)
    return is_number or not isinstance(here, int | float | Tensor)


def restore_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the options that `saved_options` returned."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
