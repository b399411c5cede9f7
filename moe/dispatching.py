"""Which dispatcher a config names."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from dispatchers.allgather import MoEAllGatherTokenDispatcher
from dispatchers.alltoall import MoEAlltoAllTokenDispatcher
from dispatchers.base import TokenDispatcher
from dispatchers.capacity import MoECapacityTokenDispatcher
from dispatchers.deduplicated import MoEDeduplicatedTokenDispatcher
from moe.config import MoEConfig
from moe.parallel import ProcessGroups
from router.capacity import slots_of_expert

DISPATCHERS: dict[str, type[TokenDispatcher[Any]]] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "deduplicated": MoEDeduplicatedTokenDispatcher,
}
# Built on a library that may be missing: its file is imported when it is asked for.
OPTIONAL_DISPATCHERS = {
    "deepep": "dispatchers.deepep_dispatcher:MoEDeepEPTokenDispatcher",
    "hybridep": "dispatchers.deepep_dispatcher:MoEHybridEPTokenDispatcher",
}


def build_dispatcher(config: MoEConfig, groups: ProcessGroups | None = None) -> TokenDispatcher[Any]:
    """Return the dispatcher that a config names.

    Raises:
        ValueError: sizes that the groups do not divide.
        ImportError: a backend whose library is not installed.
    """
    name = config.dispatcher_name
    if config.has_static_shapes and config.moe_expert_capacity_factor is not None:
        capacity_of = partial(
            slots_of_expert,
            topk=config.moe_router_topk,
            num_experts=config.num_moe_experts,
            capacity_factor=config.moe_expert_capacity_factor,
        )
        return MoECapacityTokenDispatcher(
            config,
            groups,
            capacity_of=capacity_of,
            num_tokens=config.moe_expert_capacity_tokens,
            pad_multiple=config.pad_multiple,
        )
    if name in OPTIONAL_DISPATCHERS:
        module, attribute = OPTIONAL_DISPATCHERS[name].split(":")
        try:
            dispatcher_class = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise ImportError(
                f"moe_flex_dispatcher_backend ({name!r}) needs DeepEP's module deep_ep ({error}); install it from"
                " github.com/deepseek-ai/DeepEP, or choose 'deduplicated', which needs nothing."
            ) from error
        return dispatcher_class(config, groups, pad_multiple=config.pad_multiple)
    return DISPATCHERS[name](config, groups, pad_multiple=config.pad_multiple)
