"""What the modelled traffic is held to, at one layer: Qwen3-30B-A3B on 32768 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.machines import Machine
from bench.shapes import QWEN3_30B
from bench.targets import Target

if TYPE_CHECKING:
    from bench.roofline import ModelledPass

NUM_TOKENS = 32768
DIRECTIONS = ("forward", "backward")
COMPULSORY_OVER_PLAN = 1.02
DRAM_OVER_PLAN = 1.15
FORWARD_OVER_UNFUSED = 0.45


# launches that gather tokens: gate_up; grad_act and both weight gradients
NUM_GATHERS = {"forward": 1, "backward": 3}


def tokens_lost_bytes(machine: Machine) -> float:
    """Bytes that a gather reads again if the cache holds nothing but tokens, whatever the order.

    Tokens come in no order that can be known beforehand, so a cache that holds a share of them has
    that share of the K - 1 further readings.
    """
    tokens_bytes = NUM_TOKENS * QWEN3_30B.H * 2
    share_held = min(1.0, machine.cache_bytes / tokens_bytes)
    return (QWEN3_30B.K - 1) * tokens_bytes * (1.0 - share_held)


def list_targets(passes: Sequence[ModelledPass], machines: Sequence[Machine]) -> list[Target]:
    """The targets; those of a layer that was not modelled count as missed.

    Args:
        passes: what was modelled.
        machines: whose caches the modelled DRAM is held to.
    """
    found: dict[tuple[str, str, str], ModelledPass] = {
        (entry.layer, entry.direction, entry.machine): entry
        for entry in passes
        if (entry.shape, entry.T) == (QWEN3_30B.name, NUM_TOKENS)
    }
    targets = []
    for direction in DIRECTIONS:
        entry = found.get(("piper", direction, machines[0].name))
        value = None if entry is None else entry.compulsory_bytes / entry.plan_bytes
        name = f"{direction}: compulsory over the plan"
        targets.append(Target(name, COMPULSORY_OVER_PLAN, value, sense="at_most"))
    for machine in machines:
        targets += _dram_targets(found, machine)
    entry = found.get(("piper", "forward", machines[0].name))
    rows_bytes = NUM_TOKENS * QWEN3_30B.K * QWEN3_30B.H * 2
    num_large = None if entry is None else float(entry.largest_kept_bytes >= rows_bytes)
    name = "kept for backward: tensors as large as R * H"
    targets.append(Target(name, 0.0, num_large, sense="at_most"))
    return targets


def _dram_targets(
    found: Mapping[tuple[str, str, str], ModelledPass], machine: Machine
) -> list[Target]:
    """What one machine's cache makes of it."""
    targets = []
    cache = f"{machine.name}, {machine.cache_bytes / 1e6:.0f} MB"
    for direction in DIRECTIONS:
        entry = found.get(("piper", direction, machine.name))
        value = limit = None
        if entry is not None:
            value = entry.dram_bytes / entry.plan_bytes
            lost = tokens_lost_bytes(machine) * NUM_GATHERS[direction]
            limit = 1.0 + lost / entry.plan_bytes
        name = f"{direction}: modelled DRAM over the plan ({cache})"
        targets.append(Target(name, DRAM_OVER_PLAN, value, limit, sense="at_most"))
    entry = found.get(("piper", "forward", machine.name))
    unfused = found.get(("unfused", "forward", machine.name))
    value = None if entry is None or unfused is None else entry.dram_bytes / unfused.dram_bytes
    name = f"forward: modelled DRAM over the unfused layer's ({cache})"
    targets.append(Target(name, FORWARD_OVER_UNFUSED, value, sense="at_most"))
    return targets
