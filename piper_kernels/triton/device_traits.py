"""What a device can do that changes the code of a kernel, and a way to assume it otherwise.

Kernels are recorded and interpreted without their device, so that look can be replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# tensor descriptors (TMA) came with Hopper: CUDA C++ Programming Guide, compute capability 9.0
_FIRST_WITH_DESCRIPTORS = 9
# AMD's matrix instructions multiply TF32 on one architecture: LLVM's AMDGPU guide, xf32-insts
_HIP_WITH_TF32 = "gfx942"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTraits:
    """What changes a kernel's code.

    Attributes:
        has_descriptors: loads whole tiles through tensor descriptors.
        has_tf32: its matrix instructions multiply TF32.
    """

    has_descriptors: bool
    has_tf32: bool


PLAIN_TRAITS = DeviceTraits(has_descriptors=False, has_tf32=True)
_assumed: ContextVar[DeviceTraits | None] = ContextVar("_assumed", default=None)


@contextmanager
def assume_traits(traits: DeviceTraits) -> Iterator[None]:
    """Let every device have these traits inside, whatever it is.

    Example:
        >>> with assume_traits(DeviceTraits(has_descriptors=True, has_tf32=True)):
        ...     traits_of(torch.device("cpu")).has_descriptors
        True
    """
    token = _assumed.set(traits)
    try:
        yield
    finally:
        _assumed.reset(token)


def traits_of_target(target: str) -> DeviceTraits:
    """The traits of a compilation target.

    Example:
        >>> traits_of_target("sm_90").has_descriptors, traits_of_target("gfx950").has_tf32
        (True, False)
    """
    if target.startswith("gfx"):
        return DeviceTraits(has_descriptors=False, has_tf32=target == _HIP_WITH_TF32)
    capability = int(target.removeprefix("sm_")) // 10
    return DeviceTraits(has_descriptors=capability >= _FIRST_WITH_DESCRIPTORS, has_tf32=True)


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device; a device that is no GPU has :data:`PLAIN_TRAITS`."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return PLAIN_TRAITS
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return traits_of_target(properties.gcnArchName.split(":")[0])
    return traits_of_target(f"sm_{properties.major}{properties.minor}")
