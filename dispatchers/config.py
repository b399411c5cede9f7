"""Settings of the token dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

DispatcherType = Literal["allgather", "alltoall", "deduplicated", "flex"]
FlexBackend = Literal["deduplicated", "deepep", "hybridep"]


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Dispatcher settings under Megatron-Core's field names; checked at construction.

    Raises:
        ValueError: a value out of range, or fields that contradict each other.
    """

    num_moe_experts: int  # E, experts over all ranks
    moe_token_dispatcher_type: DispatcherType = "alltoall"  # how tokens travel between ranks
    moe_flex_dispatcher_backend: FlexBackend = "deduplicated"  # the dispatcher that "flex" stands for
    moe_dispatch_dtype: Literal["fp8"] | None = None  # rows cross ranks in this format; None: as they are
    moe_dispatch_grad_dtype: Literal["fp8"] | None = None  # so do the gradients of dispatch; None: as they are
    moe_dispatch_node_size: int | None = None  # ranks of a node: deduplicated crosses nodes first; None: one level
    moe_dispatch_num_chunks: int = 1  # tokens travel in so many parts, the next while experts compute one
    moe_deterministic: bool = False  # bitwise the same results over runs, chunks and expert-parallel sizes
    moe_check_collectives: bool = False  # debug: compare op, shape, dtype and splits over the group before each call

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        for name in ("num_moe_experts", "moe_dispatch_num_chunks", "moe_dispatch_node_size"):
            value = getattr(self, name)
            if value is None and name == "moe_dispatch_node_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a positive whole number.")
        for name in ("moe_deterministic", "moe_check_collectives"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be True or False.")
        for name, choices in (
            ("moe_token_dispatcher_type", get_args(DispatcherType)),
            ("moe_flex_dispatcher_backend", get_args(FlexBackend)),
            ("moe_dispatch_dtype", (None, "fp8")),
            ("moe_dispatch_grad_dtype", (None, "fp8")),
        ):
            if getattr(self, name) not in choices:
                allowed = ", ".join(repr(choice) for choice in choices)
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be one of {allowed}.")
        self._check_together()

    def _check_together(self) -> None:
        """Check what contradicts."""
        kind = self.moe_token_dispatcher_type
        if self.moe_flex_dispatcher_backend != "deduplicated" and kind != "flex":
            raise ValueError(
                f"moe_flex_dispatcher_backend ({self.moe_flex_dispatcher_backend!r}) belongs to"
                f" moe_token_dispatcher_type 'flex', not {kind!r}; set that or leave the backend out."
            )
        if self.moe_dispatch_grad_dtype is not None and self.moe_dispatch_dtype is None:
            raise ValueError(
                f"moe_dispatch_grad_dtype ({self.moe_dispatch_grad_dtype!r}) needs moe_dispatch_dtype (None): gradients"
                " are packed where rows are; set both or neither."
            )
        if self.moe_dispatch_node_size is not None and self.dispatcher_name != "deduplicated":
            raise ValueError(
                f"moe_dispatch_node_size ({self.moe_dispatch_node_size}) belongs to moe_token_dispatcher_type"
                f" 'deduplicated', not {self.dispatcher_name!r}; set that or leave the size out."
            )
        if self.moe_dispatch_dtype is not None and self.dispatcher_name in ("deepep", "hybridep"):
            raise ValueError(
                f"moe_dispatch_dtype ({self.moe_dispatch_dtype!r}) is not available with moe_flex_dispatcher_backend"
                f" {self.dispatcher_name!r}; it works with 'deduplicated'."
            )
        if self.moe_deterministic and self.dispatcher_name != "alltoall":
            raise ValueError(
                f"moe_deterministic (True) needs moe_token_dispatcher_type 'alltoall', not {self.dispatcher_name!r}:"
                " the others add a token's experts up by rank first, so that sums depend on the number of ranks."
            )
        if self.moe_deterministic and self.moe_dispatch_dtype is not None:
            raise ValueError(
                f"moe_deterministic (True) and moe_dispatch_dtype ({self.moe_dispatch_dtype!r}) contradict each other:"
                " one rank packs nothing, so results would depend on the number of ranks; choose one of them."
            )

    @property
    def dispatcher_name(self) -> str:
        """What moe_token_dispatcher_type stands for, "flex" replaced by its backend."""
        kind = self.moe_token_dispatcher_type
        return self.moe_flex_dispatcher_backend if kind == "flex" else kind

    @property
    def dispatch_payload(self) -> Literal["plain", "fp8", "fp8 both ways"]:
        """How dispatched rows cross ranks, as `start_all_to_all_rows` names it."""
        if self.moe_dispatch_dtype is None:
            return "plain"
        return "fp8" if self.moe_dispatch_grad_dtype is None else "fp8 both ways"
