"""Who sits where, from what launchers say."""

import pytest

from piper_kernels.dist.topology_launcher import (
    groups_by_number,
    hosts_of_nodelist,
    topology_from_environment,
    topology_from_hosts,
)
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError

LIKE = frontier(1)


def ranks(topology) -> list[tuple[int, ...]]:
    return [node.ranks for node in topology.nodes]


def test_topology_from_hosts_in_any_order() -> None:
    groups = {"a": "r0", "b": "r1"}
    topology = topology_from_hosts(list("abaab"), like=LIKE, host_to_group=groups)
    assert ranks(topology) == [(0, 2, 3), (1, 4)]
    assert topology.nodes[0].nics == (0, 0, 1)
    assert topology.level_of(0, 1) == "far"
    assert topology_from_hosts(list("ab"), like=LIKE).level_of(0, 1) == "group"


def test_topology_from_hosts_instructs() -> None:
    with pytest.raises(ConfigError, match=r"host_to_group must name .* got none for \['b'\]"):
        topology_from_hosts(list("ab"), like=LIKE, host_to_group={"a": "r0"})
    with pytest.raises(ConfigError, match=r"hosts must put at most 8 ranks on a host.* got 9 on a"):
        topology_from_hosts(list("a" * 9), like=LIKE)
    with pytest.raises(ConfigError, match="hosts must name the host of each rank"):
        topology_from_hosts([], like=LIKE)


def test_topology_from_environment_torchrun() -> None:
    environment = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "RANK": "3"}
    assert ranks(topology_from_environment(environment, like=LIKE)) == [(0, 1), (2, 3), (4, 5)]
    environment["WORLD_SIZE"] = "7"
    with pytest.raises(ConfigError, match=r"multiple of LOCAL_WORLD_SIZE = 2, got 7. .*differ in"):
        topology_from_environment(environment, like=LIKE)
    environment["WORLD_SIZE"] = "four"
    with pytest.raises(ConfigError, match="WORLD_SIZE must be an integer >= 1, got 'four'"):
        topology_from_environment(environment, like=LIKE)


SLURM = {
    "SLURM_NTASKS": "7",
    "SLURM_JOB_NODELIST": "n[01-02,12]",
    "SLURM_TASKS_PER_NODE": "3,2(x2)",
}


def test_topology_from_environment_slurm_block() -> None:
    topology = topology_from_environment(SLURM, like=LIKE)
    assert [node.host for node in topology.nodes] == ["n01", "n02", "n12"]
    assert ranks(topology) == [(0, 1, 2), (3, 4), (5, 6)]


def test_topology_from_environment_slurm_cyclic() -> None:
    environment = {**SLURM, "SLURM_DISTRIBUTION": "cyclic:block"}
    topology = topology_from_environment(environment, like=LIKE)
    assert ranks(topology) == [(0, 3, 6), (1, 4), (2, 5)]


def test_topology_from_environment_slurm_step_wins() -> None:
    step = {
        **SLURM,
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "n12",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    assert topology_from_environment(step, like=LIKE).nodes[0].host == "n12"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"SLURM_DISTRIBUTION": "plane=4"},
            "SLURM_DISTRIBUTION must be block or cyclic, got plane",
        ),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "name 3 nodes and 7 tasks.* got 3 nodes and 6 tasks"),
        ({"SLURM_TASKS_PER_NODE": "7"}, "got 1 nodes and 7 tasks"),
        ({"SLURM_TASKS_PER_NODE": "2x3"}, r"must look like 8\(x4\),2, got '2x3'"),
        ({"SLURM_JOB_NODELIST": "n[1-"}, r"nodelist must look like n\[01-03,7\],m5, got 'n\[1-'"),
    ],
)
def test_topology_from_environment_slurm_instructs(change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology_from_environment({**SLURM, **change}, like=LIKE)


def test_topology_from_environment_without_a_launcher() -> None:
    with pytest.raises(ConfigError, match=r"got neither. Start with torchrun or srun"):
        topology_from_environment({"HOME": "/"}, like=LIKE)
    with pytest.raises(ConfigError, match="environment must hold SLURM_JOB_NODELIST, got none"):
        topology_from_environment({"SLURM_NTASKS": "2"}, like=LIKE)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ("n1",)),
        ("frontier[00009-00011]", ("frontier00009", "frontier00010", "frontier00011")),
        ("a[1,3]-ib,b", ("a1-ib", "a3-ib", "b")),
    ],
)
def test_hosts_of_nodelist(nodelist: str, hosts: tuple[str, ...]) -> None:
    assert hosts_of_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "a,,b", "a[1]b[2]", "a[x]", "a]1"])
def test_hosts_of_nodelist_instructs(nodelist: str) -> None:
    with pytest.raises(ConfigError, match="hosts_of_nodelist: nodelist must"):
        hosts_of_nodelist(nodelist)


def test_groups_by_number() -> None:
    hosts = ["n00001", "n00128", "n00129"]
    groups = groups_by_number(hosts, hosts_per_group=128)
    assert list(groups.values()) == ["group0", "group0", "group1"]
    with pytest.raises(ConfigError, match="hosts must end in a number of at least 1, got login"):
        groups_by_number(["login"], hosts_per_group=128)
    with pytest.raises(ConfigError, match="got n0"):
        groups_by_number(["n0"], hosts_per_group=128)
