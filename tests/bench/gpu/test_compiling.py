"""Launches are recorded on meta tensors, where nothing can run, and told apart as Triton does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# kernels of this process are interpreted; a recorded launch needs those that would be compiled
CODE = """
from functools import partial
import torch
from bench.gpu import compiling, models, sweep

sweep.list_settings = models.list_settings = lambda *, is_dry: [(sweep.TINY, 4096)]
compiling.checks.list_cases = lambda *, is_dry: []
launches = compiling.list_launches()
names = sorted({launch.kernel.fn.__name__ for launch in launches})
print(len(launches), *names)
"""


def test_list_launches_finds_every_kernel_of_a_layer() -> None:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_launches, *names = done.stdout.split()
    wanted = {
        "_gate_up_kernel",
        "_grouped_gemm_kernel",
        "_grad_act_kernel",
        "_wgrad_kernel",
        "_sum_over_rows_kernel",
        "_tile_schedule_kernel",
        "_place_kernel",
    }
    assert wanted <= set(names)
    # the same setting twice (sweep and models) compiles once; gate_up is wanted with and without
    # the pre-activation, so there are a few more launches than kernels
    assert len(names) < int(num_launches) < 2 * len(names)
