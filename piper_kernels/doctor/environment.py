"""Environment variables that change what runs."""

import os
from collections.abc import Mapping

from piper_kernels.doctor.findings import Finding

INTERPRET = "TRITON_INTERPRET"
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def judge_environment(variables: Mapping[str, str], *, has_gpu: bool) -> list[Finding]:
    """Judge the variables that matter. Pure.

    Args:
        variables: the environment.
        has_gpu: whether torch can use one.
    """
    return [_judge_interpreter(variables.get(INTERPRET), has_gpu), _judge_store(variables)]


def _judge_interpreter(value: str | None, has_gpu: bool) -> Finding:
    if value != "1":
        return Finding(area="environment", name=INTERPRET, value=value or "unset")
    if has_gpu:
        advice = f"unset {INTERPRET}: kernels run in Triton's interpreter, not on the GPU."
        return Finding(
            area="environment", name=INTERPRET, value="1", status="warning", advice=advice
        )
    advice = "backend='triton' runs in the interpreter on CPU tensors: for tests, slow."
    return Finding(area="environment", name=INTERPRET, value="1", advice=advice)


def _judge_store(variables: Mapping[str, str]) -> Finding:
    value = variables.get(SHARED_STORE)
    # torchrun gives its workers a restart count; restarts are what the shared store breaks
    restarts = variables.get("TORCHELASTIC_MAX_RESTARTS", "0")
    advice = f"export {SHARED_STORE}=1 before torchrun --max-restarts: torch shares a store whose "
    advice += "old addresses break the restart."
    is_at_risk = value != "1" and restarts.isdecimal() and int(restarts) > 0
    return Finding(
        area="environment",
        name=SHARED_STORE,
        value=value or "unset",
        status="warning" if is_at_risk else "ok",
        advice="" if value == "1" else advice,
    )


def check_environment() -> list[Finding]:
    """Look at this process's environment."""
    import torch

    return judge_environment(os.environ, has_gpu=torch.cuda.is_available())
