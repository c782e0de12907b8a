"""Helpers shared by the tests, the benches and users' own tests; the library imports none of it."""

from piper_kernels.testing.closeness import assert_close_to_baseline
from piper_kernels.testing.experts_case import (
    NEEDS_ALL,
    ExpertsCase,
    make_experts_case,
    map_tensors,
    oracle,
)
from piper_kernels.testing.guards import guard_with_nan
from piper_kernels.testing.rank_group import RankOutcome
from piper_kernels.testing.ranks import RankError, rank_outcomes, run_ranks
from piper_kernels.testing.routing import ROUTING_KINDS, RoutingKind, make_routing

__all__ = [
    "NEEDS_ALL",
    "ROUTING_KINDS",
    "ExpertsCase",
    "RankError",
    "RankOutcome",
    "RoutingKind",
    "assert_close_to_baseline",
    "guard_with_nan",
    "make_experts_case",
    "make_routing",
    "map_tensors",
    "oracle",
    "rank_outcomes",
    "run_ranks",
]
