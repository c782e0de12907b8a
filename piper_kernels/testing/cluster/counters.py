"""What crossed the emulated links, counted by whoever carried it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Counters:
    """Bytes and packets so far, or between two moments.

    Attributes:
        nic_out_bytes: ``[N, K]`` that left by each NIC, headers included.
        nic_in_bytes: ``[N, K]`` that came in by each NIC.
        node_pair_bytes: ``[N, N]`` IP packets from node to node; ``None`` but for engine ``tun``.
        node_pair_payload: ``[N, N]`` the same without IP and TCP headers.
        node_pair_messages: ``[N, N]`` packets that carried payload.
        uplink_out_bytes: ``[G]`` that left each switch group for another; ``None`` with one group.
    """

    nic_out_bytes: IntArray
    nic_in_bytes: IntArray
    node_pair_bytes: IntArray | None = None
    node_pair_payload: IntArray | None = None
    node_pair_messages: IntArray | None = None
    uplink_out_bytes: IntArray | None = None

    def since(self, before: "Counters") -> "Counters":
        """What was added since ``before``."""

        def added(name: str) -> IntArray | None:
            now, then = getattr(self, name), getattr(before, name)
            return None if now is None else now - then

        return Counters(
            nic_out_bytes=self.nic_out_bytes - before.nic_out_bytes,
            nic_in_bytes=self.nic_in_bytes - before.nic_in_bytes,
            node_pair_bytes=added("node_pair_bytes"),
            node_pair_payload=added("node_pair_payload"),
            node_pair_messages=added("node_pair_messages"),
            uplink_out_bytes=added("uplink_out_bytes"),
        )
