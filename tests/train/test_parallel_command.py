"""``torchrun ... -m piper_kernels train --plan``, and what it shows."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import Mesh, Plan, Predicted
from piper_kernels.train.metrics import read_metrics
from piper_kernels.train.model import build_config
from piper_kernels.train.parallel_command import rank_table
from piper_kernels.train.rank_metrics import RankRecord
from piper_kernels.train.settings import TrainSettings

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
}


def make_plan(pp: int, ep: int, **changes: Any) -> Plan:
    config = build_config(TrainSettings(model_override=TINY), 256)
    values: dict[str, Any] = {
        "model_digest": load_model(config.to_dict()).digest(),
        "world_size": pp * ep,
        "mesh": Mesh(pp=pp, ep=ep),
        "layers_per_stage": (1, 1),
        "schedule": "1f1b",
        "num_microbatches": 8 // ep,
        "microbatch_size": 1,
        "seq_len": 16,
    }
    return Plan(**(values | changes))


def test_rank_table_sets_the_prediction_beside() -> None:
    predicted = Predicted(
        step_s=0.25, tokens_per_s=1.0, mfu=0.1, bubble_share=0.0, peak_bytes=(3 << 20, 5 << 20)
    )
    plan = make_plan(2, 1, predicted=predicted)
    records = [
        [
            RankRecord(step=1, rank=rank, stages=(rank,), step_s=9.0, peak_bytes=1 << 20),
            RankRecord(step=2, rank=rank, stages=(rank,), step_s=0.5, peak_bytes=2 << 20),
        ]
        for rank in range(2)
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(rank_table(plan, records))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "1", "1", "0.500", "0.250", "2", "5"] in rows
    assert ["0", "0", "0", "0.500", "0.250", "2", "3"] in rows


def start_torchrun(
    plan: Path, words: list[str], num_ranks: int, restarts: int = 0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts)]
    command += ["-m", "piper_kernels", "train", "--plan", str(plan), *words]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def flags(words: dict[str, Any]) -> list[str]:
    found = []
    for name, value in words.items():
        found.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            found += [f"{key}={item}" for key, item in value.items()]
        else:
            found += list(map(str, value if isinstance(value, list) else [value]))
    return found


def stated(text_file: Path, out: Path) -> list[str]:
    words: dict[str, Any] = {
        "data": str(text_file),
        "model_override": TINY,
        "steps": 20,
        "checkpoint_every": 2,
        "evaluate_every": 20,
        "timeout_s": 60,
        "out": str(out),
    }
    return flags(words)


def run(plan: Path, words: list[str], num_ranks: int, victim: int | None = None) -> str:
    """Run to the end; ``victim`` is killed after its third step, and torchrun starts all anew."""
    job = start_torchrun(plan, words, num_ranks, restarts=0 if victim is None else 1)
    try:
        if victim is not None:
            record = Path(words[-1]) / "ranks" / f"rank-{victim:05d}.jsonl"
            while job.poll() is None and num_lines(record) < 3:
                time.sleep(0.05)
            (pid,) = (pid for pid in children(job.pid) if rank_of(pid) == victim)
            os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 0, output[-3000:]
    return output


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return list(map(int, text.split()))


def rank_of(pid: int) -> int:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ranks = [entry.partition(b"=")[2] for entry in environment if entry.startswith(b"RANK=")]
    return int(ranks[0]) if ranks else -1


def check_kills(text_file: Path, tmp_path: Path, pp: int, ep: int, victims: range) -> None:
    plan = tmp_path / "plan.json"
    make_plan(pp, ep).save(plan)
    calm = tmp_path / "calm"
    output = run(plan, stated(text_file, calm), pp * ep)
    assert f"plan     pp {pp}, dp 1, ep {ep}, 1f1b, layers (1, 1)" in output
    assert "rank 1 |  .  1F0 1B0 1B0" in output
    want = [record.loss for record in read_metrics(calm / "metrics.jsonl")]
    assert len(want) == 20
    for victim in victims:
        out = tmp_path / f"killed-{victim}"
        run(plan, stated(text_file, out), pp * ep, victim)
        found = [record.loss for record in read_metrics(out / "metrics.jsonl")]
        assert found == want, victim
        assert not list((out / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_torchrun_continues_whichever_rank_of_two_is_killed(
    text_file: Path, tmp_path: Path
) -> None:
    check_kills(text_file, tmp_path, 2, 1, range(2))


@pytest.mark.slow
def test_torchrun_continues_whichever_rank_of_four_is_killed(
    text_file: Path, tmp_path: Path
) -> None:
    check_kills(text_file, tmp_path, 2, 2, range(4))


def test_torchrun_refuses_a_plan_for_other_ranks(text_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    make_plan(2, 2).save(plan)
    job = start_torchrun(plan, stated(text_file, tmp_path / "run"), 2)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    message = "--plan must be for the 2 ranks that were started, got one for 4. Start it with:"
    assert output.count(message) >= 1
    assert not (tmp_path / "run").exists()
