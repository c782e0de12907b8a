"""Presets: their published numbers, and that assumptions are called so."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.platform_presets import PRESETS, load_platform


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_label_what_is_assumed(name: str) -> None:
    platform = load_platform(name)
    assert platform.name == name
    assert "ASSUMED: efficiency curves" in platform.source
    assert platform.lay_out(platform.gpus_per_node + 1).num_nodes == 2


@pytest.mark.parametrize(
    ("name", "tflops", "gigabytes", "terabytes_per_s"),
    [
        ("frontier", 191.5, 68.7, 1.6),
        ("h100", 989.4, 80, 3.35),
        ("h200", 989.4, 141, 4.8),
        ("b200", 2250, 180, 8.0),
        ("mi300x", 1307.4, 192, 5.3),
    ],
)
def test_presets_have_the_published_peaks(
    name: str, tflops: float, gigabytes: float, terabytes_per_s: float
) -> None:
    device = load_platform(name).device
    assert device.peak_flops_per_s == pytest.approx(tflops * 1e12)
    assert device.memory_bytes == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(terabytes_per_s * 1e12)


def test_load_platform_takes_a_file(tmp_path) -> None:
    path = tmp_path / "mine.json"
    mine = load_platform("h200").replace(name="mine")
    mine.save(path)
    assert load_platform(str(path)) == mine


def test_load_platform_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"be one of frontier, .* got h10\. Did you mean 'h100'"):
        load_platform("h10")
