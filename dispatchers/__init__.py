"""Moves: tokens to the ranks of their experts and back. Imports neither moe nor router."""

from dispatchers.alltoall import AlltoAllPlan, MoEAlltoAllTokenDispatcher
from dispatchers.base import ExpertInput, LocalTokens, ReceivedRows, TokenDispatcher
from dispatchers.collectives import all_gather_counts, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from dispatchers.config import DispatcherConfig
from dispatchers.permutation import gather_rows, permute, sort_chunks_by_idxs, sum_rows, unpermute

__all__ = [
    "AlltoAllPlan",
    "DispatcherConfig",
    "ExpertInput",
    "LocalTokens",
    "MoEAlltoAllTokenDispatcher",
    "ReceivedRows",
    "TokenDispatcher",
    "all_gather_counts",
    "all_gather_rows",
    "all_to_all_rows",
    "gather_rows",
    "permute",
    "reduce_scatter_rows",
    "sort_chunks_by_idxs",
    "sum_rows",
    "unpermute",
]
