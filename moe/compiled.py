"""The expert path as one operator for torch.compile: opaque in forward and in backward, eager inside.

Dispatch, experts and combine have sizes that follow from counts, collectives, a host sync and autograd of their own. A
compiled graph holds them as one operator with a known output shape, so no count ever recompiles it:

    router (traced) -> moe::expert_path [S, B, H] -> traced; backward: traced -> moe::expert_path_backward -> traced

The operator runs the layer's own eager stages and records their autograd graph. The recording is its second output, an
object that the compiled graph keeps for backward like a saved tensor: several micro-batches may be in flight, and what
no backward asks for is freed with its graph. Eager mode uses none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

# No public way hands an operator, or returns from it, anything but tensors and numbers.
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from router.compiled import ModuleHandle

if TYPE_CHECKING:
    from moe.layer import MoELayer

AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
# Stages of the layer that are traced; the operator runs the others.
TRACED_STAGES = ("router.", "zero_experts.")


class Recording(OpaqueBase):
    """The autograd graph of one run of the expert path, from its output back to its inputs.

    Args:
        output: [S, B, H] with its graph; None: nothing was recorded.
        inputs: tensors that require a gradient, the leaves of that graph.
    """

    def __init__(self, output: Tensor | None = None, inputs: Sequence[Tensor] = ()) -> None:
        has_graph = output is not None and output.requires_grad
        # An edge does not keep the values of the output, which a compiled graph may overwrite.
        self.output = torch.autograd.graph.get_gradient_edge(output) if has_graph and output is not None else None
        self.inputs = tuple(inputs)


register_opaque_type(Recording, typ="reference")


class _Stages(nn.Module):
    """The expert path of a layer as a module, whose parameters can be lent."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        return self.layer.run(self.layer._expert_path, hidden_states, probs, routing_map)


def expert_path(layer: MoELayer, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
    """Return what the layer's dispatch, experts and combine give, as one operator of the graph that is being compiled.

    Args:
        layer: whose stages run.
        hidden_states: [S, B, H].
        probs: [T, E], zero where not routed.
        routing_map: [T, E] bool, True where routed.

    Returns:
        [S, B, H] in the dtype of hidden_states. Gradients reach hidden_states, probs and the parameters.

    Raises:
        ValueError: parameters that FSDP2 shards.

    Collectives, host syncs: those of the eager stages. Saved for backward: what they save; hidden_states and probs are
        copied, because a compiled graph reuses the memory of what it no longer needs itself.
    """
    tensors = [hidden_states, probs, *(_local_tensor(parameter) for _, parameter in _lent_parameters(layer))]
    records = torch.is_grad_enabled()
    needs_grad = [records and tensor.requires_grad for tensor in tensors]
    output, _ = torch.ops.moe.expert_path(layer.handle, tensors, routing_map, needs_grad, records)
    return output


def _local_tensor(parameter: Tensor) -> Tensor:
    """`moe.parallel.local_tensor`, as a compiler can see it: there a DTensor does not tell its attributes."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return parameter
    if "edp" in (parameter.device_mesh.mesh_dim_names or ()):
        text = "torch.compile of a MoELayer does not go with apply_fsdp, which gathers its parameters: leave one out."
        torch._dynamo.graph_break(msg=text)  # the error of fullgraph; the next line is that of the other mode
        raise ValueError(text)
    return parameter.to_local()


def _lent_parameters(layer: MoELayer) -> list[tuple[str, nn.Parameter]]:
    """The parameters of the expert path by name; not those of 8 bits, whose gradients go into `grad` by themselves."""
    named = layer.named_parameters()
    return [(name, value) for name, value in named if not name.startswith(TRACED_STAGES) and value.itemsize > 1]


@torch.library.custom_op("moe::expert_path", mutates_args=())
def _expert_path(
    handle: ModuleHandle, tensors: list[Tensor], routing_map: Tensor, needs_grad: list[bool], records: bool
) -> tuple[Tensor, Recording]:
    layer = handle.module
    if records:  # what the recording keeps outlives the memory of the arguments, which the compiler hands on
        tensors = [*(tensor.clone() for tensor in tensors[:2]), *tensors[2:]]
        routing_map = routing_map.clone()
    inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(tensors, needs_grad, strict=True)]
    names = [f"layer.{name}" for name, _ in _lent_parameters(layer)]
    with _with_autograd(), torch.set_grad_enabled(records):
        lent = dict(zip(names, inputs[2:], strict=True))
        output = torch.func.functional_call(_Stages(layer), lent, (*inputs[:2], routing_map))
    return output.detach(), Recording(output, [tensor for tensor in inputs if tensor.requires_grad])


@_expert_path.register_fake
def _(
    handle: ModuleHandle, tensors: list[Tensor], routing_map: Tensor, needs_grad: list[bool], records: bool
) -> tuple[Tensor, Recording]:
    return tensors[0].new_empty(tensors[0].shape), Recording()


@torch.library.custom_op("moe::expert_path_backward", mutates_args=())
def _expert_path_backward(recording: Recording, grad: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if recording.output is not None:
        keeps = (
            torch._C._autograd._get_current_graph_task_keep_graph()
        )  # what the caller gave as retain_graph, which nothing public tells
        with _with_autograd():
            found = torch.autograd.grad(recording.output, recording.inputs, grad, keeps, allow_unused=True)
    return [torch.zeros_like(like) if value is None else value for value, like in zip(found, inputs, strict=True)]


@_expert_path_backward.register_fake
def _(recording: Recording, grad: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Recording]) -> None:
    _, tensors, _, ctx.needs_grad, _ = inputs
    ctx.recording = output[1]
    ctx.save_for_backward(*(tensor for tensor, needs in zip(tensors, ctx.needs_grad, strict=True) if needs))


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[object, ...]:
    grads = iter(torch.ops.moe.expert_path_backward(ctx.recording, grad, list(ctx.saved_tensors)))
    return None, [next(grads) if needs else None for needs in ctx.needs_grad], None, None, None


_expert_path.register_autograd(_backward, setup_context=_keep)


def _with_autograd() -> AbstractContextManager[Any]:
    """Return a context in which autograd sees what runs, as in eager code: operators run below it.

    There is no public way back above it.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
