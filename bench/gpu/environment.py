"""The first part: what device is this, with which versions."""

from functools import partial

from bench.gpu.device import Device, describe
from bench.gpu.part_log import PartLog


def run(log: PartLog, device: Device) -> None:
    """One row."""
    log.attempt("environment", partial(describe, device))
