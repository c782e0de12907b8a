"""The ranks of a job: joining them, and starting together or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from piper_kernels.errors import PiperError, TrainingError

T = TypeVar("T")


def num_ranks_started() -> int:
    """As torchrun says; 1 without it.

    Example:
        >>> num_ranks_started() >= 1
        True
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined_ranks(device: torch.device, timeout_s: float) -> Iterator[None]:
    """A default process group of all ranks that torchrun started, or of this process alone.

    One that exists already is taken, and left.

    Args:
        device: of this rank; NCCL for CUDA, gloo for the CPU.
        timeout_s: after which a rank that does not answer is an error on the others, in seconds.
    """
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
    if "WORLD_SIZE" not in os.environ:
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local_device(name: str) -> str:
    """``cuda`` with this rank's number on its node; other names as they are.

    Example:
        >>> local_device("cpu")
        'cpu'
    """
    has_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if has_gpu else name


def together(what: str, do: Callable[[], T]) -> T:
    """Call ``do`` on every rank; if it fails on one, it has failed on all.

    Args:
        what: for the message, e.g. ``"read the checkpoint"``.
        do: raises a ``PiperError`` for what a user can mend; makes no collective call.

    Returns:
        What ``do`` returned here.

    Raises:
        PiperError: the one of this rank.
        TrainingError: another rank could not; it is named with its message.
    """
    error: PiperError | None = None
    result: Any = None
    try:
        result = do()
    except PiperError as found:
        error = found
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else str(error))
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank, message = failed[0]
        raise TrainingError(f"rank {dist.get_rank()}: rank {rank} cannot {what}: {message}")
    return result
