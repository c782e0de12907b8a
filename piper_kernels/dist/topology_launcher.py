"""Topology from what a launcher says: torchrun's or SLURM's variables, and host names.

The environment is an argument, never read here. Speeds and GPU-NIC affinity come from another
topology (a preset or a probed file); the launcher only says who sits where.
"""

import re
from collections.abc import Mapping, Sequence

from piper_kernels.dist.topology import Node, Topology
from piper_kernels.errors import ConfigError, instruction, require


def topology_from_hosts(
    hosts: Sequence[str], *, like: Topology, host_to_group: Mapping[str, str] | None = None
) -> Topology:
    """Who sits where, from the host name of every rank.

    Args:
        hosts: ``[P]`` host name of each rank, in rank order; in any order, as after an all-gather.
        like: gives the speeds, and by its first node which NIC each local rank uses.
        host_to_group: switch group of each host; ``None`` puts all hosts in one group.

    Raises:
        ConfigError: a host has no group, or more ranks than the first node of ``like``.

    Example:
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> topology_from_hosts(["a", "b", "a", "b"], like=frontier(1)).nodes[1].ranks
        (1, 3)
    """
    name = "topology_from_hosts"
    require(len(hosts) > 0, name, "hosts", "name the host of each rank", list(hosts))
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if host_to_group is not None:
        homeless = sorted(set(ranks_of) - set(host_to_group))
        remedy = "Add them, or pass None for one group."
        requirement = "name the group of each host"
        fits = not homeless
        require(fits, name, "host_to_group", requirement, f"none for {homeless}", remedy)
    nics, nodes = like.nodes[0].nics, []
    for host, ranks in ranks_of.items():
        requirement = f"put at most {len(nics)} ranks on a host, as {like.name} has"
        remedy = "Pass a `like` whose first node is as large as yours."
        fits = len(ranks) <= len(nics)
        require(fits, name, "hosts", requirement, f"{len(ranks)} on {host}", remedy)
        group = like.nodes[0].group if host_to_group is None else host_to_group[host]
        nodes.append(Node(host=host, group=group, ranks=tuple(ranks), nics=nics[: len(ranks)]))
    return like.replace(nodes=tuple(nodes))


def topology_from_environment(
    environment: Mapping[str, str],
    *,
    like: Topology,
    host_to_group: Mapping[str, str] | None = None,
) -> Topology:
    """Who sits where, from the variables that torchrun or srun sets for each process.

    Under torchrun ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are read; nodes are named ``node0`` ...
    Otherwise SLURM's ``SLURM_NTASKS``, ``SLURM_TASKS_PER_NODE``, node list and distribution are.

    Raises:
        ConfigError: neither launcher's variables are there, nodes of different sizes under torchrun
            (it does not say which: use :func:`topology_from_hosts`), a value that cannot be read,
            or a SLURM distribution other than block and cyclic.

    Example:
        >>> from piper_kernels.dist.topology_presets import frontier
        >>> environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
        >>> topology_from_environment(environment, like=frontier(1)).num_nodes
        2
    """
    if "WORLD_SIZE" in environment and "LOCAL_WORLD_SIZE" in environment:
        hosts = _torchrun_hosts(environment)
    elif "SLURM_NTASKS" in environment:
        hosts = _slurm_hosts(environment)
    else:
        requirement = "hold WORLD_SIZE and LOCAL_WORLD_SIZE (torchrun) or SLURM_NTASKS (srun)"
        remedy = "Start with torchrun or srun, or pass host names to topology_from_hosts."
        name = "topology_from_environment"
        raise ConfigError(instruction(name, "environment", requirement, "neither", remedy))
    return topology_from_hosts(hosts, like=like, host_to_group=host_to_group)


def hosts_of_nodelist(nodelist: str) -> tuple[str, ...]:
    """Host names of SLURM's compact list, leading zeros kept.

    Raises:
        ConfigError: the list cannot be read.

    Example:
        >>> hosts_of_nodelist("n[08-10,12],login")
        ('n08', 'n09', 'n10', 'n12', 'login')
    """
    name, hosts = "hosts_of_nodelist", list[str]()
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    readable = bool(items) and ",".join(items) == nodelist
    require(readable, name, "nodelist", "look like n[01-03,7],m5", repr(nodelist))
    for item in items:
        prefix, bracket, rest = item.partition("[")
        inside, _, suffix = rest.partition("]")
        if not bracket:
            hosts.append(prefix)
            continue
        for span in inside.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
            fits = match is not None and "[" not in suffix
            require(fits, name, "nodelist", "hold numbers and ranges in one [...]", repr(item))
            assert match is not None
            first, last = match[1], match[2] or match[1]
            for number in range(int(first), int(last) + 1):
                hosts.append(f"{prefix}{number:0{len(first)}d}{suffix}")
    return tuple(hosts)


def groups_by_number(
    hosts: Sequence[str], *, hosts_per_group: int, first_number: int = 1
) -> dict[str, str]:
    """``host_to_group`` for a machine that numbers its hosts group after group.

    Raises:
        ConfigError: a host's name does not end in a number of at least ``first_number``.

    Example:
        >>> groups_by_number(["n00001", "n00128", "n00129"], hosts_per_group=128)
        {'n00001': 'group0', 'n00128': 'group0', 'n00129': 'group1'}
    """
    groups = {}
    for host in hosts:
        match = re.search(r"(\d+)$", host)
        fits = match is not None and int(match[1]) >= first_number
        requirement = f"end in a number of at least {first_number}"
        remedy = "Write host_to_group by hand."
        require(fits, "groups_by_number", "hosts", requirement, host, remedy)
        assert match is not None
        groups[host] = f"group{(int(match[1]) - first_number) // hosts_per_group}"
    return groups


def _number(environment: Mapping[str, str], key: str) -> int:
    text = environment[key]
    fits = text.isascii() and text.isdigit() and int(text) >= 1
    require(fits, "topology_from_environment", key, "be an integer >= 1", repr(text))
    return int(text)


def _torchrun_hosts(environment: Mapping[str, str]) -> list[str]:
    world, local = _number(environment, "WORLD_SIZE"), _number(environment, "LOCAL_WORLD_SIZE")
    remedy = "Nodes differ in size: gather host names and call topology_from_hosts."
    requirement = f"be a multiple of LOCAL_WORLD_SIZE = {local}"
    fits = world % local == 0
    require(fits, "topology_from_environment", "WORLD_SIZE", requirement, world, remedy)
    return [f"node{rank // local}" for rank in range(world)]


def _slurm_hosts(environment: Mapping[str, str]) -> list[str]:
    """Host of each task; tasks go to nodes in blocks or in turns."""
    name = "topology_from_environment"
    num_tasks = _number(environment, "SLURM_NTASKS")
    key = next((k for k in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if k in environment), "")
    require(bool(key), name, "environment", "hold SLURM_JOB_NODELIST", "none", "Start with srun.")
    hosts = hosts_of_nodelist(environment[key])
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    tasks = tasks if tasks in environment else "SLURM_TASKS_PER_NODE"
    sizes = _tasks_per_node(environment.get(tasks, ""), tasks)
    requirement = (
        f"name {len(hosts)} nodes and {num_tasks} tasks, as the node list and SLURM_NTASKS"
    )
    found = f"{len(sizes)} nodes and {sum(sizes)} tasks"
    fits = (len(sizes), sum(sizes)) == (len(hosts), num_tasks)
    require(fits, name, tasks, requirement, found)
    # "cyclic:block" also says how tasks go to sockets, which matters to nobody here
    distribution = environment.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if distribution == "block":
        return [host for host, size in zip(hosts, sizes, strict=True) for _ in range(size)]
    remedy = "Gather host names and call topology_from_hosts."
    fits = distribution == "cyclic"
    require(fits, name, "SLURM_DISTRIBUTION", "be block or cyclic", distribution, remedy)
    turns = range(max(sizes))
    return [h for turn in turns for h, size in zip(hosts, sizes, strict=True) if turn < size]


def _tasks_per_node(text: str, key: str) -> list[int]:
    """``2(x3),1`` means 2, 2, 2, 1."""
    sizes: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        requirement = "look like 8(x4),2"
        require(match is not None, "topology_from_environment", key, requirement, repr(text))
        assert match is not None
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes
