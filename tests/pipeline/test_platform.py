"""The platform file: what it refuses, in words, and how it lays out GPUs."""

import json

import pytest

from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.platform import Device, Platform
from piper_kernels.pipeline.platform_presets import load_platform


def frontier_text(**changes: object) -> str:
    fields = json.loads(load_platform("frontier").to_json())
    for key, value in changes.items():
        place = fields["device"] if key in Device.model_fields or key == "typo" else fields
        place["peak_flops" if key == "typo" else key] = value
    return json.dumps(fields)


def test_platform_reads_back_what_it_writes() -> None:
    platform = load_platform("h100")
    assert Platform.from_json(platform.to_json()) == platform


def test_platform_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"p\.json: device\.peak_flops must be a field of Device"):
        Platform.from_json(frontier_text(typo=1.0), source="p.json")
    with pytest.raises(ConfigError, match=r"Did you mean 'peak_flops_per_s'\?"):
        Platform.from_json(frontier_text(typo=1.0), source="p.json")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (
            "memory_bandwidth_bytes_per_s",
            0.0,
            "memory_bandwidth_bytes_per_s must be greater than 0",
        ),
        ("memory_bytes", -1, "memory_bytes must be greater than 0, got -1"),
        ("memory_efficiency", 0.0, "memory_efficiency must be above 0"),
        ("memory_efficiency", 1.5, "memory_efficiency must be less than or equal to 1"),
        ("reserved_bytes", 2**40, "reserved_bytes must be below memory_bytes"),
        ("nodes_per_domain", 0, "nodes_per_domain must be greater than 0"),
        ("gemm_efficiency", [[8.0, 0.5], [4.0, 0.6]], "gemm_efficiency must have rising sizes"),
    ],
)
def test_platform_refuses_impossible_values(key: str, value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Platform.from_json(frontier_text(**{key: value}))


def test_platform_refuses_nan() -> None:
    text = frontier_text().replace("191500000000000.0", "NaN")
    assert "NaN" in text
    with pytest.raises(ConfigError, match=r"peak_flops_per_s must be a finite number"):
        Platform.from_json(text)


def test_platform_knows_its_nodes() -> None:
    frontier = load_platform("frontier")
    assert (frontier.gpus_per_node, frontier.gpus_per_nic, frontier.gpus_per_domain) == (8, 2, 32)
    assert load_platform("h100").gpus_per_nic == 1
    # papers.md 1.6: about 120 FLOP per byte on a GCD
    assert frontier.device.ridge_flops_per_byte == pytest.approx(119.7, abs=0.1)


@pytest.mark.parametrize(("gpus", "sizes"), [(6, [6]), (16, [8, 8]), (7, [7]), (19, [8, 8, 3])])
def test_lay_out_takes_any_number_of_gpus(gpus: int, sizes: list[int]) -> None:
    # field report A87: numbers that do not divide
    topology = load_platform("frontier").lay_out(gpus)
    assert topology.num_ranks == gpus
    assert topology.maps.node_sizes.tolist() == sizes


def test_lay_out_fills_switch_groups() -> None:
    topology = load_platform("h100").lay_out(33 * 8)
    assert topology.num_groups == 2
    with pytest.raises(PlanError, match="num_gpus must be at least 1, got 0"):
        load_platform("h100").lay_out(0)


def test_check_reach_names_the_missing_link() -> None:
    frontier = load_platform("frontier")
    alone = frontier.topology.replace(links=frontier.topology.links.replace(group=None, far=None))
    with pytest.raises(PlanError, match=r"at most 8, as frontier describes one node only, got 16"):
        frontier.replace(topology=alone).lay_out(16)
    near = frontier.topology.replace(links=frontier.topology.links.replace(far=None))
    with pytest.raises(PlanError, match=r"Give topology.links.far, or plan for at most 1024 GPUs"):
        frontier.replace(topology=near).check_reach(2048)


def test_link_over_is_the_slowest_crossed() -> None:
    h100 = load_platform("h100")
    links = h100.topology.links
    assert h100.link_over(8, 8) is links.node
    assert h100.link_over(4, 1024) is links.node
    # runs of 6 ranks cross nodes of 8 somewhere
    assert h100.link_over(6, 24) is links.group
    assert h100.link_over(64, 1024) is links.group
    assert h100.link_over(512, 1024) is links.far
    assert h100.nic is links.group
