"""Whether moving experts is worth it now: threshold, hysteresis, benefit against cost, budget.

Pure: no torch, no process group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import pydantic

from piper_kernels.errors import require
from piper_kernels.strict_model import Fraction, PositiveInt, StrictModel

_Ratio = Annotated[float, pydantic.Field(ge=1)]


class MigrationPolicy(StrictModel):
    """When experts move. The defaults move nothing on balanced loads.

    Attributes:
        check_every_steps: steps between two looks at the loads.
        start_imbalance: a layer is taken up when its slowest rank exceeds the mean by this factor,
        stop_imbalance: and left alone again once it is below this one.
        benefit_over_cost: the seconds saved until the next look must exceed the seconds that the
            moves take by this factor.
        most_time_fraction: share of the run's time that moves may take in all.

    Example:
        >>> MigrationPolicy().check_every_steps
        100
    """

    check_every_steps: PositiveInt = 100
    start_imbalance: _Ratio = 1.10
    stop_imbalance: _Ratio = 1.05
    benefit_over_cost: _Ratio = 2.0
    most_time_fraction: Fraction = 0.05

    def model_post_init(self, _: object) -> None:
        """Check that the two thresholds leave a gap, or loads at the edge would flutter."""
        fits = self.stop_imbalance <= self.start_imbalance
        requirement = f"be at most start_imbalance = {self.start_imbalance}"
        require(fits, "MigrationPolicy", "stop_imbalance", requirement, self.stop_imbalance)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """What a new placement of one layer would bring.

    Attributes:
        slowest_before_s: seconds per step of the layer's slowest rank as it is.
        slowest_after_s: with the new placement.
        mean_s: seconds per step of the mean rank.
        move_s: seconds until the experts are there.
    """

    slowest_before_s: float
    slowest_after_s: float
    mean_s: float
    move_s: float

    @property
    def imbalance(self) -> float:
        """Slowest over mean, as it is; 1.0 where nobody has work."""
        return self.slowest_before_s / self.mean_s if self.mean_s > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """What a policy remembers between two looks.

    Attributes:
        taken_up: layers above ``start_imbalance`` that have not come below ``stop_imbalance``.
        spent_s: seconds that moves have taken so far.
    """

    taken_up: frozenset[int] = frozenset()
    spent_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether one layer's experts move, and why.

    Attributes:
        is_moving: the answer.
        saved_s: seconds that the move saves until the next look.
        cost_s: seconds that it takes.
        reason: one sentence.
    """

    is_moving: bool
    saved_s: float
    cost_s: float
    reason: str


def decide_migrations(
    policy: MigrationPolicy,
    state: PolicyState,
    proposals: Mapping[int, Proposal],
    elapsed_s: float,
) -> tuple[PolicyState, dict[int, Decision]]:
    """Decide for every layer. Those that save most per second of moving come first.

    Args:
        policy: the rules.
        state: from the look before; ``PolicyState()`` at the start.
        proposals: layer -> what a new placement would bring.
        elapsed_s: seconds since the run began, moves included.

    Returns:
        The state for the next look, and a decision for each layer.

    Example:
        >>> proposal = Proposal(slowest_before_s=2.0, slowest_after_s=1.0, mean_s=1.0, move_s=5.0)
        >>> state, decisions = decide_migrations(
        ...     MigrationPolicy(), PolicyState(), {3: proposal}, elapsed_s=1000.0)
        >>> decisions[3].reason
        'saves 100 s until the next look for 5 s of moving'
    """
    taken_up = frozenset(
        layer
        for layer, proposal in proposals.items()
        if proposal.imbalance >= policy.start_imbalance
        or (layer in state.taken_up and proposal.imbalance > policy.stop_imbalance)
    )
    spent_s = state.spent_s
    decisions: dict[int, Decision] = {}
    by_worth = sorted(proposals, key=lambda layer: (-_worth(proposals[layer]), layer))
    for layer in by_worth:
        proposal = proposals[layer]
        budget_s = policy.most_time_fraction * elapsed_s - spent_s
        decision = _decide(policy, proposal, layer in taken_up, budget_s)
        spent_s += decision.cost_s if decision.is_moving else 0.0
        decisions[layer] = decision
    after = replace(state, taken_up=taken_up, spent_s=spent_s)
    return after, {layer: decisions[layer] for layer in proposals}


def _worth(proposal: Proposal) -> float:
    saved_s = proposal.slowest_before_s - proposal.slowest_after_s
    return saved_s / proposal.move_s if proposal.move_s > 0 else float("inf")


def _decide(
    policy: MigrationPolicy, proposal: Proposal, is_taken_up: bool, budget_s: float
) -> Decision:
    per_step_s = proposal.slowest_before_s - proposal.slowest_after_s
    saved_s, cost_s = per_step_s * policy.check_every_steps, proposal.move_s
    if not is_taken_up:
        limit = policy.start_imbalance
        moves, reason = False, f"imbalance {proposal.imbalance:.3f} is below {limit:.3f}"
    elif not saved_s > policy.benefit_over_cost * cost_s:
        factor = policy.benefit_over_cost
        moves, reason = False, f"saves {saved_s:.3g} s, not {factor:g} times the {cost_s:.3g} s"
    elif cost_s > budget_s:
        share = f"{policy.most_time_fraction:.0%} of the run"
        moves, reason = False, f"takes {cost_s:.3g} s, {share} leave {max(budget_s, 0):.3g} s"
    else:
        moves = True
        reason = f"saves {saved_s:.3g} s until the next look for {cost_s:.3g} s of moving"
    return Decision(is_moving=moves, saved_s=saved_s, cost_s=cost_s, reason=reason)
