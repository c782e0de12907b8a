"""What a computation keeps, what it allocates at its peak, and whether it reads what it wrote."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def saved_for_backward(run: Callable[[], Any], parameters: Iterable[Tensor] = ()) -> list[Tensor]:
    """The tensors that ``run`` keeps for its backward.

    Args:
        run: a forward computation.
        parameters: tensors that are alive anyway; they and their views are not listed.

    Returns:
        One tensor per storage that is kept.
    """
    alive = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in alive:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return list(kept.values())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that ``run`` had allocated on the CPU at one time, on top of the start.

    Counts torch's CPU allocator in the calling thread only (torch's profiler sees no other): call
    ``torch.set_num_threads(1)`` first.

    Args:
        run: any computation; its result counts while it lives.

    Returns:
        Bytes.
    """
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as profiler:
        result = run()
    del result
    now = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@contextlib.contextmanager
def poison_new_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` and its kin return NaN; reading before writing then shows.

    Turns on ``torch.use_deterministic_algorithms``, which also refuses ops of which torch knows
    that they are not reproducible.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
