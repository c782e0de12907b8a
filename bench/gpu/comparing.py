"""Bringing inputs to a device, and holding what comes back to the oracle."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from bench.gpu.device import Device
from piper_kernels.testing import ExpertsInputs, assert_close_to_baseline


def to_device(inputs: ExpertsInputs, device: torch.device) -> ExpertsInputs:
    """The same inputs elsewhere."""
    values: dict[str, Any] = {
        field.name: value.to(device)
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    return dataclasses.replace(inputs, **values)


def assert_close(
    device: Device,
    dtype: torch.dtype,
    found: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: dict[str, Tensor],
) -> None:
    """Each result is as near to the truth as plain torch's in the same dtype, and a few units more.

    Everything that is compared is of order 1 or larger, by how the inputs are scaled.
    """
    # fp32 sums of hundreds of terms differ by their order alone; 16 units are still 2e-6. The
    # interpreter truncates to bf16 where hardware rounds: twice the error of a store
    slack = 16.0 if dtype == torch.float32 else 4.0
    if device.is_dry and dtype == torch.bfloat16:
        slack = 8.0
    assert found.keys() == truth.keys(), f"{sorted(found)}, want {sorted(truth)}"
    for name, value in found.items():
        assert_close_to_baseline(
            name,
            value,
            baseline[name],
            truth[name],
            slack=slack,
            term_size=1.0,
            # the gates' gradient is fp32, but a product of rounded factors
            compute_dtype=dtype,
        )
