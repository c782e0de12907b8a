"""The cache model against an LRU that is simulated entry by entry."""

import math
from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.cost.traffic import CacheModel, Traffic, plain


def simulate(touches: list[int], capacity: int) -> int:
    """Entries of size 1, one touch a wave, strictly least recently used."""
    held: OrderedDict[int, None] = OrderedDict()
    seen: set[int] = set()
    num_rereads = 0
    for key in touches:
        if key in held:
            held.move_to_end(key)
        else:
            num_rereads += key in seen
            held[key] = None
            if len(held) > capacity:
                held.popitem(last=False)
        seen.add(key)
    return num_rereads


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 10))
def test_cache_model_is_lru(touches: list[int], capacity: int) -> None:
    cache = CacheModel(cache_bytes=capacity, num_keys={"rows": 10})
    for key in touches:
        cache.touch("rows", np.array([key]), 1)
        cache.end_wave()
    assert cache.reread_bytes == simulate(touches, capacity)


def test_cache_model_counts_stores_and_shares_a_wave() -> None:
    cache = CacheModel(cache_bytes=10, num_keys={"a": 2, "b": 1})
    cache.touch("a", np.array([0, 1]), 4)
    cache.touch("a", np.array([0]), 4)  # in step with the first touch
    cache.end_wave()
    cache.touch("b", np.array([0]), 2)
    cache.end_wave()
    cache.touch("a", np.array([1]), 4)  # 8 + 2 bytes since: still there
    cache.end_wave()
    assert cache.reread_bytes == 0
    cache.write(5)  # of a: 0; b: 2; a: 4; stores: 5
    cache.end_wave()
    cache.touch("a", np.array([1]), 4)
    assert cache.reread_bytes == 0
    cache.touch("b", np.array([0]), 2)
    assert cache.reread_bytes == 2


def test_cache_model_loses_nothing_when_infinite() -> None:
    cache = CacheModel(cache_bytes=math.inf, num_keys={"a": 1})
    for _ in range(5):
        cache.touch("a", np.array([0]), 1e12)
        cache.end_wave()
    assert cache.reread_bytes == 0


def test_traffic_bounds_by_the_slower_of_both() -> None:
    traffic = Traffic(flops=100, issued=50, compulsory=10, reread=10)
    assert traffic.dram == 20
    assert traffic.bound_s(flops_per_s=100.0, bytes_per_s=4.0) == 5.0
    assert traffic.bound_s(flops_per_s=10.0, bytes_per_s=4.0) == 10.0
    assert plain(7) == Traffic(issued=7, compulsory=7)
