"""Which operations make new tensors of a size or more."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NewTensors(TorchDispatchMode):
    """Notes, while it is entered, every operation that returns memory of its own for at least `num_elements`.

    Views and results written in place are not new. What an operation makes inside and does not return is not seen.

    Attributes:
        operations: names, in order.
    """

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements = num_elements
        self.operations: list[str] = []
        self.kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage().data_ptr() for t in [*args, *(kwargs or {}).values()] if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in given:
                continue
            if tensor.untyped_storage().nbytes() >= self.num_elements * tensor.itemsize:
                self.operations.append(func.overloadpacket.__name__)
                self.kept.append(tensor)
        return result
