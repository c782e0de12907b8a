"""Compile what the other parts launch, in parallel, before they start.

A layer is run on meta tensors while launches are recorded instead of made: sizes, strides and
dtypes are all that a compilation needs. Processes then compile a share of the recorded kernels
each (two threads took no less time than one: most of a compilation holds Python's lock), and the
other parts find the result in Triton's cache on disk.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.gpu import checks, models, sweep
from bench.gpu.budget import TimeBudget
from bench.gpu.comparing import to_device
from bench.gpu.device import Device
from bench.gpu.part_log import NotMeasured, PartLog, Row
from bench.gpu.problem import PLAIN, Weights
from piper_kernels.contracts import ExpertsNeeds, ExpertsWeights

if TYPE_CHECKING:
    from piper_kernels.triton.launch import Launch

META = Device(torch_device=torch.device("meta"), is_dry=False)
# each holds a context on the device
MOST_PROCESSES = 12
# of the part, left for the processes to end
END_S = 5.0
ALL = ExpertsNeeds(
    x=True, gates=True, gate_up_proj=True, down_proj=True, gate_up_bias=True, down_bias=True
)


def launch_key(launch: "Launch") -> tuple[Any, ...]:
    """Launches with equal keys compile to the same binary."""
    names = set(launch.kernel.arg_names)
    cells = ((name, _kind(name, value, names)) for name, value in launch.arguments.items())
    return (launch.kernel.fn.__qualname__, *sorted(cells, key=str))


def compile_launch(launch: "Launch") -> None:
    """Compile it for the current device without running it; the grid does not matter to that."""
    launch.kernel.run(grid=(1,), warmup=True, **launch.arguments)


def _kind(name: str, value: Any, kernel_arguments: set[str]) -> Any:
    """What Triton distinguishes of an argument: dtypes, ones, multiples of 16, constants."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    if hasattr(value, "block_shape"):
        return str(value.base.dtype), tuple(value.block_shape)
    is_run_time_int = isinstance(value, int) and name in kernel_arguments and not name.isupper()
    return (value == 1, value % 16 == 0) if is_run_time_int else value


def run_layer(x: Tensor, ids: Tensor, gates: Tensor, weights: ExpertsWeights) -> None:
    """Forward, inference forward and backward of one layer, as ``functional`` would launch them."""
    from piper_kernels.triton.experts import experts_backward, experts_forward
    from piper_kernels.triton.routing_metadata import permutation_from_expert_ids

    permutation = permutation_from_expert_ids(ids, weights.num_experts)
    args = x, gates, permutation, weights
    experts_forward(*args, needs_preact=False)
    _, preact = experts_forward(*args, needs_preact=True)
    experts_backward(torch.empty_like(x), *args, preact, needs=ALL)


def check_layers() -> Iterator[Callable[[], None]]:
    """The layers of the checks."""
    for case in checks.list_cases(is_dry=False):
        inputs = to_device(case.inputs(), META.torch_device)
        yield partial(run_layer, inputs.x, inputs.expert_ids, inputs.gates, inputs.weights)


def bench_layers() -> Iterator[Callable[[], None]]:
    """The layers of the sweep and of the models, in the order in which they are measured."""
    settings = [*sweep.list_settings(is_dry=False), *models.list_settings(is_dry=False)]
    where = META.torch_device
    for shape, num_tokens in settings:
        module = Weights(shape, torch.bfloat16, where)
        weights = ExpertsWeights(
            gate_up_proj=module.gate_up_proj.detach(),
            down_proj=module.down_proj.detach(),
            gate_up_bias=None,
            down_bias=None,
            layout=PLAIN.layout,
            activation=PLAIN.activation,
        )
        x = torch.empty(num_tokens, shape.H, dtype=torch.bfloat16, device=where)
        ids = torch.empty(num_tokens, shape.K, dtype=torch.int64, device=where)
        gates = torch.empty(num_tokens, shape.K, device=where)
        yield partial(run_layer, x, ids, gates, weights)


def list_launches() -> "list[Launch]":
    """Every different launch of the other parts, the benches' first; the same in each process.

    Where there is a GPU, its launches; the meta tensors themselves know nothing of it.
    """
    from piper_kernels.triton.device_traits import PLAIN_TRAITS, assume_traits, traits_of
    from piper_kernels.triton.launch import recorded_launches

    traits = traits_of(torch.device("cuda")) if torch.cuda.is_available() else PLAIN_TRAITS
    with assume_traits(traits), recorded_launches() as launches:
        for layers in (bench_layers(), check_layers()):
            for layer in layers:
                layer()
    return list({launch_key(launch): launch for launch in launches}.values())


def compile_share(index: int, num_shares: int, seconds: float) -> tuple[int, list[str]]:
    """Compile every ``num_shares``-th launch; what cannot be compiled is told, not raised.

    Returns:
        ``(number of kernels compiled, errors)``.
    """
    budget = TimeBudget(seconds)
    num_compiled, errors = 0, []
    for launch in list_launches()[index::num_shares]:
        if not budget.has(1.0):
            errors.append("time was up")
            break
        try:
            compile_launch(launch)
            num_compiled += 1
        except Exception as error:
            errors.append(f"{launch.kernel.fn.__name__}: {type(error).__name__}: {error}"[:200])
    return num_compiled, errors


def run(log: PartLog, device: Device) -> None:
    """One row for all kernels."""
    log.attempt("all kernels", partial(_compile_all, device, log.budget))


def _compile_all(device: Device, budget: TimeBudget) -> Row:
    if not device.is_gpu:
        raise NotMeasured("interpreted kernels are not compiled")
    num_shares = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    seconds = max(1.0, budget.left_s - END_S)
    with ProcessPoolExecutor(num_shares, mp_context=get_context("spawn")) as pool:
        shares = pool.map(
            compile_share, range(num_shares), [num_shares] * num_shares, [seconds] * num_shares
        )
        results = list(shares)
    errors = [error for _, found in results for error in found]
    return {
        "num_compiled": sum(num for num, _ in results),
        "num_processes": num_shares,
        "num_errors": len(errors),
        "errors": errors[:5],
    }
