"""How per-expert checkpoints name the matrices of one expert."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from piper_kernels.errors import CheckpointError, instruction

IN_EXPERTS = re.compile(r"(?P<prefix>(?:.*\.)?experts)\.(?P<rest>.+)")
PER_EXPERT = re.compile(r"(?P<expert>0|[1-9]\d*)\.(?P<part>\w+)\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a per-expert checkpoint names the matrices of one expert.

    Attributes:
        up: ``[I, H]``.
        down: ``[H, I]``.
        gate: ``[I, H]``, or ``None`` for experts without a gate.
        renames: pairs (per-expert, fused) of name parts that differ in every key.
    """

    up: str
    down: str
    gate: str | None
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The matrices of an expert: gate (if any), up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    @property
    def fused_first(self) -> str:
        """Name of the fused first projection."""
        return "up_proj" if self.gate is None else "gate_up_proj"

    def to_fused(self, key: str) -> str:
        """``key`` with the renames applied."""
        for mine, fused in self.renames:
            key = key.replace(mine, fused)
        return key

    def to_per_expert(self, key: str) -> str:
        """The inverse of :meth:`to_fused`."""
        for mine, fused in self.renames:
            key = key.replace(fused, mine)
        return key


# Source: transformers 5.24, conversion_mapping.py (its converters for "mixtral", "qwen2_moe",
# "nemotron_h").
MIXTRAL_NAMES = ExpertNames(
    gate="w1", up="w3", down="w2", renames=((".block_sparse_moe.", ".mlp."),)
)
QWEN_NAMES = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")
NEMOTRON_NAMES = ExpertNames(
    gate=None, up="up_proj", down="down_proj", renames=(("backbone.", "model."),)
)


def find_names(keys: Iterable[str]) -> ExpertNames:
    """The naming convention of a per-expert checkpoint: Mixtral's or Qwen's.

    Ungated experts share two names with Qwen's, so ``NEMOTRON_NAMES`` is never found, only given.

    Raises:
        CheckpointError: there are no per-expert keys, or both conventions occur.
    """
    parts: dict[str, str] = {}
    for key in keys:
        inside = IN_EXPERTS.fullmatch(key)
        match = inside and PER_EXPERT.fullmatch(inside["rest"])
        if match:
            parts.setdefault(match["part"], key)
    fitting = [names for names in (MIXTRAL_NAMES, QWEN_NAMES) if set(names.parts) & set(parts)]
    if len(fitting) == 1:
        return fitting[0]
    wanted = "hold keys <prefix>.experts.<e>.<name>.weight with names w1, w2, w3 or gate_proj, "
    wanted += "up_proj, down_proj"
    found = ", ".join(repr(key) for key in parts.values()) or "none"
    remedy = "Fused experts need no conversion." if found == "none" else ""
    raise CheckpointError(instruction("fuse_experts", "the checkpoint", wanted, found, remedy))
