"""The emulated cluster does what it says: rates, delays, gaps, bytes, NICs; and leaves nothing."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from piper_kernels.testing.cluster import (
    Cluster,
    ClusterError,
    ClusterShape,
    LinkShape,
    emulated_cluster,
    node_network,
    why_no_cluster,
)
from piper_kernels.testing.cluster import cluster as cluster_module
from piper_kernels.testing.rank_process import RankPlace
from piper_kernels.testing.ranks import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(bool(why_no_cluster()), reason=why_no_cluster())

RATE = 12.5e6


def pair(engine: Any = "bridge", **link: float) -> ClusterShape:
    """Two nodes of one rank."""
    nic = LinkShape(**{"rate_bytes_per_s": RATE, **link})
    return ClusterShape(ranks_per_node=(1, 1), nic=nic, engine=engine)


def send_seconds(num_bytes: int, num_rounds: int) -> list[float]:
    """What rank 1 waits for each message of rank 0, after a first one that opens the way."""
    data = torch.ones(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(num_rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(data, 1)
        elif dist.get_rank() == 1:
            data.zero_()
            dist.recv(data, 0)
            assert bool(data.all()), "bytes were lost"
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def round_trips(num_rounds: int) -> list[float]:
    """Seconds of a ping and a pong of one byte over a plain TCP connection."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        server = socket.create_server(("10.65.0.1", 0))
        store.set("port", str(server.getsockname()[1]))
        connection, _ = server.accept()
    else:
        port = int(store.get("port"))
        connection = socket.create_connection(("10.65.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    with connection:
        for _ in range(num_rounds):
            start = time.perf_counter()
            if dist.get_rank() == 0:
                connection.sendall(b"x")
                assert connection.recv(1) == b"x"
            else:
                assert connection.recv(1) == b"x"
                connection.sendall(b"x")
            seconds.append(time.perf_counter() - start)
    return seconds


@pytest.mark.parametrize("engine", ["bridge", "tun"])
def test_emulated_cluster_has_the_rate(engine: str) -> None:
    """10 % slower is TCP's share and scheduling; faster than the link is impossible."""
    num_bytes, num_rounds = int(RATE * 0.2), 3
    with emulated_cluster(pair(engine)) as cluster:
        seconds = cluster.run_ranks(send_seconds, num_bytes, num_rounds)[1]
        counters = cluster.counters()
    # the quickest is the one that nobody else on this machine disturbed
    rate = num_bytes / min(seconds)
    assert 0.88 * RATE <= rate <= 1.02 * RATE
    sent = num_bytes * (num_rounds + 1)
    assert sent <= counters.nic_out_bytes[0, 0] <= 1.1 * sent
    assert sent <= counters.nic_in_bytes[1, 0] <= 1.1 * sent
    assert counters.nic_out_bytes[1, 0] < 0.1 * sent


def test_emulated_cluster_counts_bytes_between_nodes_exactly() -> None:
    num_bytes = 1_000_000
    with emulated_cluster(pair("tun")) as cluster:
        empty = cluster.counters()
        cluster.run_ranks(send_seconds, num_bytes, 1)
        counters = cluster.counters().since(empty)
    payload = counters.node_pair_payload
    assert payload is not None
    assert counters.node_pair_bytes is not None
    assert counters.node_pair_messages is not None
    # two messages; the rest is gloo's own: headers, barriers, greetings
    assert 0 <= payload[0, 1] - 2 * num_bytes <= 4096
    assert 0 < payload[1, 0] <= 4096
    assert (np.diag(counters.node_pair_bytes) == 0).all()
    # every packet has a header of 20 + 20 bytes at least, 60 + 60 at most
    headers = counters.node_pair_bytes - payload
    assert (headers[~np.eye(2, dtype=bool)] > 0).all()
    assert counters.node_pair_messages[0, 1] >= 2 * num_bytes / 65_000
    assert counters.nic_out_bytes[0, 0] == counters.node_pair_bytes[0, 1]
    assert counters.nic_in_bytes[1, 0] == counters.node_pair_bytes[0, 1]


@pytest.mark.parametrize(("delay_s", "gap_s"), [(0.0, 0.0), (0.005, 0.0), (0.0, 0.002)])
def test_emulated_cluster_has_delay_and_gap(delay_s: float, gap_s: float) -> None:
    """A ping-pong pays both twice; an undisturbed machine itself adds less than a millisecond."""
    with emulated_cluster(pair("tun", delay_s=delay_s, gap_s=gap_s)) as cluster:
        seconds = cluster.run_ranks(round_trips, 20)[0]
    asked = 2 * (delay_s + gap_s)
    assert asked <= min(seconds) <= asked + 1e-3


def exchange(num_bytes: int) -> None:
    """Every rank sends to the rank with its own local rank on each other node."""
    local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    peers = [r for r in range(local, dist.get_world_size(), size) if r != dist.get_rank()]
    data = torch.ones(num_bytes, dtype=torch.uint8)
    received = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in peers]
    works = [dist.isend(data, peer) for peer in peers]
    works += [dist.irecv(into, peer) for peer, into in zip(peers, received, strict=True)]
    for work in works:
        work.wait()
    assert all(bool(into.all()) for into in received)


@pytest.mark.parametrize("engine", ["bridge", "tun"])
@pytest.mark.parametrize("local_rank_to_nic", [(), (0, 0)], ids=["affinity", "one-nic"])
def test_emulated_cluster_uses_the_nics_that_were_given(
    engine: Any, local_rank_to_nic: tuple[int, ...]
) -> None:
    num_bytes = 500_000
    shape = ClusterShape(
        ranks_per_node=(2, 2),
        nics_per_node=2,
        local_rank_to_nic=local_rank_to_nic,
        nic=LinkShape(rate_bytes_per_s=100e6),
        engine=engine,
    )
    with emulated_cluster(shape) as cluster:
        cluster.run_ranks(exchange, num_bytes)
        counters = cluster.counters()
    for sent in (counters.nic_out_bytes, counters.nic_in_bytes):
        if local_rank_to_nic:
            assert (sent[:, 0] >= 2 * num_bytes).all()
            assert (sent[:, 1] < 20_000).all()
        else:
            assert (sent >= num_bytes).all()
            assert (sent.max(axis=1) <= 1.1 * sent.min(axis=1)).all()


@pytest.mark.parametrize("engine", ["bridge", "tun"])
def test_emulated_cluster_narrows_the_way_between_groups(engine: Any) -> None:
    """Rank 1 is in the group of rank 0, rank 2 is not."""
    shape = ClusterShape(
        ranks_per_node=(1, 1, 1),
        node_to_group=(0, 0, 1),
        nic=LinkShape(rate_bytes_per_s=40e6),
        uplink=LinkShape(rate_bytes_per_s=10e6),
        engine=engine,
    )
    num_bytes = 2_000_000
    with emulated_cluster(shape) as cluster:
        near, far = cluster.run_ranks(seconds_to_each, num_bytes)[0]
        counters = cluster.counters()
    assert num_bytes / near > 25e6
    assert 8.8e6 <= num_bytes / far <= 10.3e6
    assert counters.uplink_out_bytes is not None
    assert num_bytes <= counters.uplink_out_bytes[0] <= 1.2 * num_bytes


def seconds_to_each(num_bytes: int) -> tuple[float, float]:
    """What rank 0 needs to send to rank 1, then to rank 2, and to hear that it is there."""
    data, seconds = torch.ones(num_bytes, dtype=torch.uint8), []
    for peer in (1, 2):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(data, peer)
            dist.recv(data[:1], peer)
        elif dist.get_rank() == peer:
            dist.recv(data, 0)
            dist.send(data[:1], 0)
        seconds.append(time.perf_counter() - start)
    return seconds[0], seconds[1]


def surroundings() -> tuple[str, ...]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "GLOO_SOCKET_IFNAME")
    return (socket.gethostname(), *(os.environ[name] for name in names))


def test_emulated_cluster_tells_ranks_where_they_are() -> None:
    shape = ClusterShape(
        ranks_per_node=(2, 1), nics_per_node=2, nic=LinkShape(rate_bytes_per_s=10e6)
    )
    with emulated_cluster(shape) as cluster:
        assert cluster.run_ranks(surroundings) == [
            ("node0", "0", "2", "0", "eth0"),
            ("node0", "1", "2", "1", "eth1"),
            ("node1", "0", "1", "2", "eth0"),
        ]
    assert socket.gethostname() != "node1"


def networks_of(pid: int) -> set[str]:
    """The network namespaces that a process is in or keeps open."""
    found = set()
    for link in (Path(f"/proc/{pid}/ns/net"), *Path(f"/proc/{pid}/fd").glob("*")):
        # processes and files come and go
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return {target for target in found if target.startswith("net:")}


def wait_until_gone(networks: set[str]) -> None:
    """Wait until no process has anything to do with some namespaces: then they are no more."""
    deadline = time.monotonic() + 10
    left = networks
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
        left = networks & set().union(*(networks_of(pid) for pid in pids))
    assert not left


def fail() -> None:
    raise RuntimeError("boom")


@pytest.mark.parametrize("engine", ["bridge", "tun"])
def test_emulated_cluster_leaves_nothing_after_an_error(engine: str) -> None:
    home = os.readlink("/proc/self/ns/net")
    devices = [name for _, name in socket.if_nameindex()]
    made: set[str] = set()

    def use(cluster: Cluster) -> None:
        made.update(networks_of(cluster.pid) - {home})
        assert len(made) >= 2
        # nothing of it shows outside
        assert [name for _, name in socket.if_nameindex()] == devices
        cluster.run_ranks(fail)

    with (
        pytest.raises(RankError, match="RuntimeError: boom"),
        emulated_cluster(pair(engine)) as cluster,
    ):
        use(cluster)
    wait_until_gone(made)


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from piper_kernels.testing.cluster import *

def nap():
    print("here", flush=True)
    time.sleep(60)

def shape(engine):
    return ClusterShape(
        ranks_per_node=(1, 1), nic=LinkShape(rate_bytes_per_s=1e7), engine=engine)

if __name__ == "__main__":
    with emulated_cluster(shape("tun")) as one, emulated_cluster(shape("bridge")) as two:
        print(one.pid, two.pid, flush=True)
        two.run_ranks(nap)
"""


def test_emulated_cluster_leaves_nothing_after_sigkill(tmp_path: Path) -> None:
    script = tmp_path / "naps.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        made = set().union(*(networks_of(pid) for pid in pids))
        made -= {os.readlink("/proc/self/ns/net")}
        assert len(made) >= 5
        # ranks are about to start, or run
        time.sleep(0.3)
        process.kill()
    wait_until_gone(made)


def test_emulated_cluster_says_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "why_no_namespaces", lambda: "no right")
    with (
        pytest.raises(ClusterError, match="emulated_cluster: no right"),
        emulated_cluster(pair()),
    ):
        pass


def test_emulated_cluster_reports_a_host_that_died() -> None:
    with emulated_cluster(pair()) as cluster:
        os.kill(cluster.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{cluster.pid}/fd").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(ClusterError, match="the network is not there: its process does not"):
            cluster.counters()


def stay_at_home() -> None:
    """A rank that never talks."""


def test_cluster_run_ranks_refuses_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ranks had found a way past the network."""
    with emulated_cluster(pair()) as cluster:
        still = cluster.counters()
        monkeypatch.setattr(cluster, "counters", lambda: still)
        with pytest.raises(ClusterError, match=r"nothing has left nodes \[0, 1\] by their NICs"):
            cluster.run_ranks(stay_at_home)


def test_cluster_rank_outcomes_tells_how_each_ended() -> None:
    with emulated_cluster(pair()) as cluster:
        outcomes = cluster.rank_outcomes(fail_on_one)
    assert [outcome.kind for outcome in outcomes] == ["returned", "raised"]


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("boom")


def test_run_ranks_needs_a_place_for_each_rank() -> None:
    place = RankPlace(
        namespace="/proc/self/ns/net", host="a", interface="lo", local_rank=0, num_local_ranks=1
    )
    with pytest.raises(ValueError, match="places must be one for each of the 2 ranks, got 1"):
        run_ranks(stay_at_home, 2, places=[place])


def test_run_tool_says_what_failed() -> None:
    with pytest.raises(ClusterError, match="`tc qdisc show dev nowhere` failed: Cannot find"):
        node_network.run_tool("tc", "qdisc", "show", "dev", "nowhere")
    with pytest.raises(ClusterError, match=r"`ip` failed: .*nowhere"):
        node_network.run_ip(["link set nowhere up"])
