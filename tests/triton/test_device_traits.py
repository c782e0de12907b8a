"""What a device can do: told by its architecture, replaced while nothing runs on it."""

from types import SimpleNamespace

import pytest
import torch

from piper_kernels.triton.device_traits import (
    PLAIN_TRAITS,
    DeviceTraits,
    assume_traits,
    traits_of,
    traits_of_target,
)
from piper_kernels.triton.offline.cases import TARGETS

WITH_DESCRIPTORS = DeviceTraits(has_descriptors=True, has_tf32=True)


def test_traits_of_target() -> None:
    assert [t for t in TARGETS if traits_of_target(t).has_descriptors] == ["sm_90", "sm_100"]
    with_tf32 = [target for target in TARGETS if traits_of_target(target).has_tf32]
    assert with_tf32 == ["sm_80", "sm_90", "sm_100", "gfx942"]
    # consumer Blackwell has TMA, Turing and Ada have not
    assert [traits_of_target(t).has_descriptors for t in ("sm_120", "sm_75", "sm_89")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("properties", "hip", "target"),
    [
        (SimpleNamespace(major=9, minor=0), None, "sm_90"),
        (SimpleNamespace(major=10, minor=3), None, "sm_103"),
        (SimpleNamespace(major=8, minor=0), None, "sm_80"),
        (SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"), "6.4", "gfx942"),
        (SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-"), "6.4", "gfx90a"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_traits_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, properties: SimpleNamespace, hip: str | None, target: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert traits_of(torch.device("cuda:1")) == traits_of_target(target)


def test_assume_traits_ends_with_its_block() -> None:
    cpu = torch.device("cpu")
    assert traits_of(cpu) == PLAIN_TRAITS
    with assume_traits(WITH_DESCRIPTORS):
        assert traits_of(cpu) == traits_of(torch.device("cuda")) == WITH_DESCRIPTORS
    assert traits_of(cpu) == PLAIN_TRAITS
