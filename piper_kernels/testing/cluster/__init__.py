"""Emulated clusters: nodes as network namespaces, links of a chosen speed, counted bytes."""

from piper_kernels.testing.cluster.cluster import Cluster, emulated_cluster, why_no_cluster
from piper_kernels.testing.cluster.counters import Counters
from piper_kernels.testing.cluster.node_network import ClusterError
from piper_kernels.testing.cluster.shape import ClusterShape, Engine, LinkShape

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterShape",
    "Counters",
    "Engine",
    "LinkShape",
    "emulated_cluster",
    "why_no_cluster",
]
