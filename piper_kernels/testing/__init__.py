"""Helpers shared by the tests, the benches and users' own tests; the library imports none of it."""

from piper_kernels.testing.closeness import assert_close_to_baseline
from piper_kernels.testing.experts import (
    ExpertsInputs,
    assert_experts_match_oracle,
    make_experts_inputs,
    run_experts,
)
from piper_kernels.testing.guards import guard_with_nan
from piper_kernels.testing.rank_group import RankOutcome
from piper_kernels.testing.ranks import RankError, rank_outcomes, run_ranks
from piper_kernels.testing.routing import ROUTING_KINDS, RoutingKind, make_routing

__all__ = [
    "ROUTING_KINDS",
    "ExpertsInputs",
    "RankError",
    "RankOutcome",
    "RoutingKind",
    "assert_close_to_baseline",
    "assert_experts_match_oracle",
    "guard_with_nan",
    "make_experts_inputs",
    "make_routing",
    "rank_outcomes",
    "run_experts",
    "run_ranks",
]
