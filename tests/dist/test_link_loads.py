"""Bytes and messages per port."""

import numpy as np

from piper_kernels.dist.halo_plan import make_plan
from piper_kernels.dist.link_loads import link_loads
from piper_kernels.dist.topology_presets import frontier


def test_link_loads_by_hand() -> None:
    topology = frontier(3, nodes_per_group=2).select([0, 1, 8, 9, 16])
    counts = np.zeros((5, 5), dtype=np.int64)
    counts[0, 0], counts[0, 1], counts[0, 2], counts[1, 4], counts[4, 3] = 7, 1, 2, 3, 4
    loads = link_loads(topology, make_plan(topology, counts, 10, "flat").phases, 10)
    assert loads.level_bytes == {"self": 70, "node": 10, "group": 20, "far": 70}
    assert loads.level_messages == {"self": 1, "node": 1, "group": 1, "far": 2}
    assert loads.gpu_out_bytes.tolist() == [10, 0, 0, 0, 0]
    assert loads.gpu_in_bytes.tolist() == [0, 10, 0, 0, 0]
    # ranks 0 and 1 share a NIC, ranks 2 and 3 too
    assert loads.nic_out_bytes.tolist() == [50, 0, 40]
    assert loads.nic_in_bytes.tolist() == [0, 60, 30]
    assert loads.nic_out_messages.tolist() == [2, 0, 1]
    assert loads.group_out_bytes.tolist() == [30, 40]
    assert loads.group_in_bytes.tolist() == [40, 30]
    assert loads.node_pair_bytes.tolist() == [[0, 20, 30], [0, 0, 0], [0, 40, 0]]
    assert loads.rank_messages.tolist() == [1, 1, 0, 0, 1]
