"""The weights of one linear of all local experts: in high precision, or quantized with masters in the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe.parallel import ProcessGroups, local_tensor, shard_expert_buffer, shard_expert_parameter
from moe.quantization.formats import E4M3
from moe.quantization.quantize import Quantized, quantize
from moe.quantization.recipes import QuantizationRecipe


class ExpertLinear(nn.Module):
    """The weights and biases of one linear of all local experts.

    Attributes:
        weight: parameter [L, ...]; a DTensor [E, ...] if experts are spread over ranks.
        bias: parameter [L, ...] likewise, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    def extra_repr(self) -> str:
        """Show the global shapes when the module is printed."""
        bias = "None" if self.bias is None else list(self.bias.shape)
        return f"weight={list(self.weight.shape)}, bias={bias}, dtype={self.weight.dtype}"

    def local_weight(self) -> Tensor:
        """Return this rank's weight."""
        return local_tensor(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load as nn.Module does; codes and plain weights are not taken for each other, strict or not."""
        *_, error_msgs = args
        loaded = state_dict.get(f"{prefix}weight")
        if loaded is not None and (loaded.itemsize == 1) != (self.weight.itemsize == 1):
            error_msgs.append(
                f"{prefix}weight is {loaded.dtype} in the state and {self.weight.dtype} here: fp8_param must be equal."
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def set_expert(self, index: int, values: Tensor) -> None:
        """Overwrite the weight of a local expert with values [...] of its shape."""
        self.local_weight()[index] = values


class QuantizedExpertLinear(ExpertLinear):
    """An ExpertLinear whose weight is stored as codes of E4M3 with scales: one byte a value.

    Autograd does not know gradients of a wider dtype than such a sharded weight's, so backward adds them up in
    `weight.grad` itself, in fp32. `MasterWeights` gives the optimizer something to step.

    Args:
        weight: [L, ...] of torch.float8_e4m3fn, or the DTensor.
        bias: as in ExpertLinear.
        recipe: whose weight blocks are the same for both products that read a weight.
        groups: process groups; None on one process.
        etp_dim: the dimension that expert-tensor parallelism splits.

    Attributes:
        weight_scale: [L, ..., blocks of rows, blocks of columns] fp32.
    """

    weight_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        recipe: QuantizationRecipe,
        groups: ProcessGroups | None,
        etp_dim: int,
    ) -> None:
        super().__init__(weight, bias)
        self.recipe = recipe
        self.masters: tuple[nn.Parameter, ...] = ()  # one at most, which is the optimizer's: not a parameter of this
        *leading, rows, cols = self.local_weight().shape
        block_rows, block_cols = recipe.weight_block.sizes((rows, cols))
        if recipe.weight_block.rows is None:
            leading = [leading[0]] + [1] * (len(leading) - 1)
        scale = torch.ones(*leading, rows // block_rows, cols // block_cols)
        is_split = groups is not None and groups.is_expert_sharded and recipe.weight_block.rows is not None
        self.register_buffer(
            "weight_scale",
            shard_expert_parameter(scale, groups, etp_dim)
            if is_split and groups
            else shard_expert_buffer(scale, groups),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExpertLinear:
        """Move the module as nn.Module does; codes and scales keep their dtype."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            keeps = tensor.dtype == E4M3.dtype or tensor is self.weight_scale
            return tensor.to(result.device) if keeps and result.dtype != tensor.dtype else result

        super()._apply(moved, recurse)
        return self

    def matrices(self) -> tuple[Quantized, ...]:
        """Return each local expert's weight as a matrix [rows, columns], gate and up one below the other."""
        codes, scales = self.local_weight().detach(), local_tensor(self.weight_scale)
        return tuple(
            Quantized(code.flatten(0, -2), scale.flatten(0, -2), E4M3, self.recipe.weight_block)
            for code, scale in zip(codes, scales, strict=True)
        )

    @torch.no_grad()
    def set_expert(self, index: int, values: Tensor) -> None:
        """Quantize values [...] and overwrite the weight of a local expert."""
        quantized = quantize(values.flatten(0, -2), E4M3, self.recipe.weight_block, self.recipe.scale_format)
        codes, scales = self.local_weight()[index], local_tensor(self.weight_scale)[index]
        codes.copy_(quantized.codes.view(codes.shape))
        scales.copy_(quantized.scale.view(scales.shape))

    def add_gradient(self, grad: Tensor) -> None:
        """Add this rank's gradient [L, ...] fp32 to weight.grad, which becomes it where there is none.

        With a master weight.grad and master.grad are one tensor; where either was dropped, a new one begins.
        """
        kept, (master,) = self.weight.grad, self.masters or (None,)
        is_begun = kept is not None and (master is None or _is_same(master.grad, kept))
        if kept is not None and is_begun:
            local_tensor(kept).add_(grad)
            return
        self.weight.grad_dtype = torch.float32
        self.weight.grad = like_parameter(grad, self.weight)
        if master is not None:
            master.grad = self.weight.grad


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return one is not None and local_tensor(one).data_ptr() == local_tensor(other).data_ptr()


def like_parameter(local: Tensor, parameter: Any) -> Tensor:
    """Return a local tensor, as a DTensor laid out like the parameter if that is one."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)


class MasterWeights:
    """The fp32 masters of a model's quantized weights, which the optimizer steps in their place.

        masters = MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.of(model.parameters()))
        masters.attach(optimizer)

    A weight's gradient is its master's as well, the same tensor, so that clipping and loss scaling over the optimizer's
    parameters see it. After a step the weight becomes the quantized master. Checkpoints hold a master beside the
    optimizer's state of its weight, named `master_param`, and loading them with the optimizer restores it. Masters
    begin as the weights' own values: make them after weights were loaded without an optimizer, and once for a model.

    Args:
        model: without quantized weights there are no masters, and nothing happens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.linears: list[QuantizedExpertLinear] = []
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: dict[nn.Parameter, int] = {}
        for module in model.modules():
            if isinstance(module, QuantizedExpertLinear):
                shape = module.local_weight().shape
                values = torch.stack([matrix.dequantize() for matrix in module.matrices()]).view(shape)
                master = nn.Parameter(like_parameter(values, module.weight))
                master.primary_weight = module.weight  # type: ignore[attr-defined]  # what checkpoints name it after
                module.masters = (master,)
                self.masters[module.weight] = master
                self.linears.append(module)
                self._versions[module.weight] = module.local_weight()._version

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters, masters in the place of quantized weights."""
        return [self.masters.get(parameter, parameter) for parameter in parameters]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps update the quantized weights whose masters it holds, and its zero_grad reach them.

        Raises:
            ValueError: there are masters, and the optimizer holds none of them.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        linears = [linear for linear in self.linears if id(self.masters[linear.weight]) in held]
        if self.linears and not linears:
            raise ValueError(
                "optimizer holds no master of this model's quantized weights: build it over"
                " masters.of(model.parameters())."
            )
        optimizer.register_step_pre_hook(lambda *_: self._prepare(linears))
        optimizer.register_step_post_hook(lambda *_: self._quantize(linears))
        zero_grad = optimizer.zero_grad

        def zero_all(set_to_none: bool = True) -> None:
            """Clear the gradients of the optimizer's parameters, and of the weights whose masters they are."""
            zero_grad(set_to_none)
            for linear in linears if set_to_none else ():
                linear.weight.grad = None

        optimizer.zero_grad = zero_all  # type: ignore[method-assign]

    @torch.no_grad()
    def _prepare(self, linears: list[QuantizedExpertLinear]) -> None:
        """Hand over gradients that were made for weights alone.

        Raises:
            RuntimeError: a weight was overwritten since, and its master was not.
        """
        for linear in linears:
            master = self.masters[linear.weight]
            if master.grad is None:
                master.grad = linear.weight.grad
            if linear.local_weight()._version != self._versions[linear.weight]:
                kept = (linear.local_weight().view(torch.uint8), local_tensor(linear.weight_scale))
                before = [tensor.clone() for tensor in kept]
                self._quantize([linear], drops_gradients=False)
                if not torch.equal(kept[0], before[0]):
                    for tensor, values in zip(kept, before, strict=True):
                        tensor.copy_(values)
                    raise RuntimeError(
                        "a quantized weight was loaded or changed after MasterWeights was made, and this step would"
                        " undo it: make MasterWeights after loading, or load a checkpoint with its optimizer."
                    )

    @torch.no_grad()
    def _quantize(self, linears: list[QuantizedExpertLinear], *, drops_gradients: bool = True) -> None:
        """Make weights the quantized masters, and drop their gradients."""
        for linear in linears:
            for index, values in enumerate(local_tensor(self.masters[linear.weight])):
                linear.set_expert(index, values)
            self._versions[linear.weight] = linear.local_weight()._version
            if drops_gradients:
                linear.weight.grad = self.masters[linear.weight].grad = None
