"""What each compilation must keep to: ``budgets.json`` beside this file, and the comparison. Pure.

For bf16, fp16 and integers the rules are the same everywhere: no spill, no stack, no more shared
memory than the target has, the target's matrix instructions in every GEMM, weights through tensor
descriptors where the target has them. What may differ by target is in the file, fp32 included.
"""

from functools import cache
from pathlib import Path

from piper_kernels.strict_model import NonNegativeInt, StrictModel
from piper_kernels.triton.candidates import SHARED_MEMORY_BYTES
from piper_kernels.triton.offline.assembly import Resources
from piper_kernels.triton.offline.cases import GEMMS, Case

_TALL_ROWS = 64


class Fp32Budget(StrictModel):
    """What fp32 may take.

    Attributes:
        stack_bytes: of a thread, at most.
        num_spills: at most.
    """

    stack_bytes: NonNegativeInt
    num_spills: NonNegativeInt


class TargetBudget(StrictModel):
    """What may differ between targets.

    Attributes:
        tall_matrix: which matrix instructions serve a GEMM tile of 64 rows or more: one of these.
        short_matrix: the same for tiles of 16 and 32 rows.
        fp32: of fp32, which needs no matrix instruction: it is multiplied exactly.
    """

    tall_matrix: tuple[str, ...]
    short_matrix: tuple[str, ...]
    fp32: Fp32Budget


class Budgets(StrictModel):
    """The whole file: target -> budget."""

    targets: dict[str, TargetBudget]


@cache
def load_budgets() -> Budgets:
    """The budgets of the repository.

    Raises:
        ConfigError: naming the field that is wrong.
    """
    path = Path(__file__).with_name("budgets.json")
    return Budgets.from_json(path.read_text(), source=path.name)


def _matrix_fault(case: Case, resources: Resources, budget: TargetBudget) -> str | None:
    if case.tiles is None or case.dtype == "fp32":
        return None
    is_tall = case.tiles.block_m >= _TALL_ROWS
    wanted = budget.tall_matrix if is_tall else budget.short_matrix
    if any(kind.startswith(wanted) for kind in resources.matrix):
        return None
    return f"no {' or '.join(wanted)}, but {resources.matrix_text() or 'no matrix instruction'}"


def find_faults(case: Case, resources: Resources, budgets: Budgets) -> list[str]:
    """In what a compilation exceeds its budget; empty if in nothing.

    Args:
        case: what was compiled.
        resources: what it takes.
        budgets: of all targets.
    """
    budget = budgets.targets[case.target]
    allowed = Fp32Budget(stack_bytes=0, num_spills=0)
    if case.dtype == "fp32":
        allowed = budget.fp32
    limits = [
        ("stack bytes", resources.stack_bytes, allowed.stack_bytes),
        ("spills", resources.num_spills, allowed.num_spills),
        ("bytes of shared memory", resources.shared_bytes, SHARED_MEMORY_BYTES[case.target]),
    ]
    faults = [f"{value} {name}, allowed {limit}" for name, value, limit in limits if value > limit]
    if case.op in GEMMS:
        fault = _matrix_fault(case, resources, budget)
        faults += [] if fault is None else [fault]
    if case.reads_descriptor and not resources.num_descriptor_loads:
        faults.append("weights are not read through a tensor descriptor")
    return faults
