"""Settings of the token dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Dispatcher settings under Megatron-Core's field names; checked at construction.

    Raises:
        ValueError: a value out of range.
    """

    num_moe_experts: int  # E, experts over all ranks
    moe_token_dispatcher_type: Literal["alltoall"] = "alltoall"  # how tokens travel between ranks
    moe_check_collectives: bool = False  # debug: compare op, shape, dtype and splits over the group before each call

    def __post_init__(self) -> None:
        """Check what the fields alone can tell."""
        if self.num_moe_experts < 1:
            raise ValueError(f"num_moe_experts ({self.num_moe_experts}) must be a positive number.")
        if self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(f"moe_token_dispatcher_type ({self.moe_token_dispatcher_type!r}) must be 'alltoall'.")
