"""When experts move, and when not."""

from collections.abc import Mapping

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.migration_policy import (
    Decision,
    MigrationPolicy,
    PolicyState,
    Proposal,
    decide_migrations,
)

POLICY = MigrationPolicy(check_every_steps=10, start_imbalance=1.2, stop_imbalance=1.1)
FRESH = PolicyState()


def proposal(before: float, after: float = 1.0, move_s: float = 0.1) -> Proposal:
    return Proposal(slowest_before_s=before, slowest_after_s=after, mean_s=1.0, move_s=move_s)


def decide(
    proposals: Mapping[int, Proposal], state: PolicyState = FRESH, elapsed_s: float = 1e6
) -> tuple[PolicyState, dict[int, Decision]]:
    return decide_migrations(POLICY, state, proposals, elapsed_s)


def test_balanced_loads_move_nothing() -> None:
    proposals = {0: proposal(1.0), 1: proposal(1.02)}
    _, decisions = decide_migrations(MigrationPolicy(), FRESH, proposals, 1e9)
    assert not any(decision.is_moving for decision in decisions.values())
    idle = Proposal(slowest_before_s=0.0, slowest_after_s=0.0, mean_s=0.0, move_s=1.0)
    _, decisions = decide({0: idle})
    assert decisions[0].reason == "imbalance 1.000 is below 1.200"


def test_hysteresis_keeps_a_layer_until_it_is_well_balanced() -> None:
    state = FRESH
    moved = []
    # below both thresholds, above, between, below the lower one, between
    for slowest in (1.15, 1.3, 1.15, 1.05, 1.15):
        state, decisions = decide({0: proposal(slowest)}, state)
        moved.append(decisions[0].is_moving)
    assert moved == [False, True, True, False, False]


def test_a_move_must_pay() -> None:
    # 0.5 s saved per step, 10 steps until the next look: 5 s for 2.5 s is not more than twice
    _, decisions = decide({0: proposal(1.5, move_s=2.5), 1: proposal(1.5, move_s=2.4)})
    assert not decisions[0].is_moving
    assert decisions[0].reason == "saves 5 s, not 2 times the 2.5 s"
    assert decisions[1].is_moving
    assert decisions[1].saved_s == 5.0


def test_a_move_that_does_not_help_is_never_made() -> None:
    _, decisions = decide({0: proposal(1.5, after=1.5, move_s=0.0)})
    assert not decisions[0].is_moving


def test_the_budget_goes_to_what_is_worth_most() -> None:
    proposals = {0: proposal(1.5, move_s=1.0), 1: proposal(2.0, move_s=1.0)}
    state, decisions = decide(proposals, elapsed_s=30.0)
    assert [decisions[layer].is_moving for layer in (0, 1)] == [False, True]
    assert decisions[0].reason == "takes 1 s, 5% of the run leave 0.5 s"
    assert state.spent_s == 1.0
    state, decisions = decide({0: proposals[0]}, state, elapsed_s=41.0)
    assert decisions[0].is_moving
    assert state.spent_s == 2.0


def test_migration_policy_refuses() -> None:
    message = r"stop_imbalance must be at most start_imbalance = 1.1, got 1.2"
    with pytest.raises(ConfigError, match=message):
        MigrationPolicy(stop_imbalance=1.2)
    with pytest.raises(ConfigError, match="start_imbalance must be greater than or equal to 1"):
        MigrationPolicy(start_imbalance=0.9)
    with pytest.raises(ConfigError, match="check_every_steps"):
        MigrationPolicy(check_every_steps=0)
