"""Variables that change what runs."""

import pytest

from piper_kernels.doctor.environment import check_environment, judge_environment

STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def judged(variables: dict[str, str], has_gpu: bool = False) -> dict[str, tuple[str, str, str]]:
    findings = judge_environment(variables, has_gpu=has_gpu)
    return {f.name: (f.status, f.value, f.advice) for f in findings}


def test_judge_environment_warns_of_the_interpreter_on_a_gpu() -> None:
    status, value, advice = judged({"TRITON_INTERPRET": "1"}, has_gpu=True)["TRITON_INTERPRET"]
    assert (status, value) == ("warning", "1")
    assert advice.startswith("unset TRITON_INTERPRET")
    assert judged({"TRITON_INTERPRET": "1"})["TRITON_INTERPRET"][0] == "ok"
    assert judged({}, has_gpu=True)["TRITON_INTERPRET"][:2] == ("ok", "unset")


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, "ok"),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, "ok"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, "warning"),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", STORE: "1"}, "ok"),
    ],
)
def test_judge_environment_warns_where_torchrun_may_restart(
    variables: dict[str, str], status: str
) -> None:
    found = judged(variables)[STORE]
    assert found[0] == status
    assert (f"export {STORE}=1" in found[2]) == (variables.get(STORE) != "1")


def test_check_environment_looks_at_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE, "1")
    assert {f.name: f.value for f in check_environment()}[STORE] == "1"
