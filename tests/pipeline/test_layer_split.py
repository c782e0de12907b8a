"""Layer splits: as good as trying all of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import PlanError
from piper_kernels.pipeline.layer_split import balance_layers


def slowest(split: tuple[int, ...], layer_s: list[float], first_s: float, last_s: float) -> float:
    ends = list(itertools.accumulate(split))
    sums = [sum(layer_s[end - count : end]) for end, count in zip(ends, split, strict=True)]
    sums[0] += first_s
    sums[-1] += last_s
    return max(sums)


@given(
    layer_s=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=8),
    num_stages=st.integers(1, 5),
    first_s=st.floats(0, 5),
    last_s=st.floats(0, 5),
)
def test_balance_layers_is_as_good_as_any(
    layer_s: list[float], num_stages: int, first_s: float, last_s: float
) -> None:
    if num_stages > len(layer_s):
        with pytest.raises(PlanError, match=f"at least the {num_stages} stages"):
            balance_layers(layer_s, num_stages)
        return
    split = balance_layers(layer_s, num_stages, first_s=first_s, last_s=last_s)
    assert sum(split) == len(layer_s)
    assert min(split) >= 1
    cuts = itertools.combinations(range(1, len(layer_s)), num_stages - 1)
    edges = [(0, *cut, len(layer_s)) for cut in cuts]
    every = [tuple(b - a for a, b in itertools.pairwise(edge)) for edge in edges]
    best = min(slowest(s, layer_s, first_s, last_s) for s in every)
    assert slowest(split, layer_s, first_s, last_s) == pytest.approx(best)


def test_balance_layers_spares_the_heavy_last_stage() -> None:
    assert balance_layers([1.0] * 16, 4, last_s=2.0)[-1] == 3
