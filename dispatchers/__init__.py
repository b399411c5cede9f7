"""Moves: tokens to the ranks of their experts and back. Imports neither moe nor router."""

from dispatchers.accounting import CommunicationCounter, Traffic
from dispatchers.allgather import AllGatherPlan, MoEAllGatherTokenDispatcher
from dispatchers.alltoall import AlltoAllPlan, MoEAlltoAllTokenDispatcher
from dispatchers.base import Counts, ExpertInput, InTransit, LocalTokens, TokenDispatcher
from dispatchers.capacity import CapacityPlan, MoECapacityTokenDispatcher
from dispatchers.collectives import (
    RankGroup,
    RowsInFlight,
    SumInFlight,
    all_gather_counts,
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
    start_all_gather_rows,
    start_all_to_all_rows,
    start_reduce_scatter_rows,
)
from dispatchers.config import DispatcherConfig
from dispatchers.deduplicated import DeduplicatedPlan, MoEDeduplicatedTokenDispatcher
from dispatchers.host_memory import release_host_memory
from dispatchers.permutation import gather_rows, permute, sort_chunks_by_idxs, sum_rows, unpermute

__all__ = [
    "AllGatherPlan",
    "AlltoAllPlan",
    "CapacityPlan",
    "CommunicationCounter",
    "Counts",
    "DeduplicatedPlan",
    "DispatcherConfig",
    "ExpertInput",
    "InTransit",
    "LocalTokens",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoECapacityTokenDispatcher",
    "MoEDeduplicatedTokenDispatcher",
    "RankGroup",
    "RowsInFlight",
    "SumInFlight",
    "TokenDispatcher",
    "Traffic",
    "all_gather_counts",
    "all_gather_rows",
    "all_to_all_rows",
    "gather_rows",
    "permute",
    "reduce_scatter_rows",
    "release_host_memory",
    "sort_chunks_by_idxs",
    "start_all_gather_rows",
    "start_all_to_all_rows",
    "start_reduce_scatter_rows",
    "sum_rows",
    "unpermute",
]
