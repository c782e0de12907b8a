"""Chunks through stages, against the pipeline formula and the resources' own bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.dist.chunk_schedule import Stage, makespan, schedule_chunks
from piper_kernels.errors import ConfigError


def chain(seconds: list[float], resources: list[str]) -> tuple[Stage, ...]:
    stages = []
    for index, (time, resource) in enumerate(zip(seconds, resources, strict=True)):
        after = (f"s{index - 1}",) if index else ()
        stages.append(Stage(name=f"s{index}", seconds=time, resources=(resource,), after=after))
    return tuple(stages)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_makespan_is_the_pipeline_formula(seconds: list[int], num_chunks: int) -> None:
    """One resource per stage: all stages once, plus n - 1 times the longest."""
    stages = chain(list(map(float, seconds)), [f"r{i}" for i in range(len(seconds))])
    expected = sum(seconds) + (num_chunks - 1) * max(seconds)
    assert makespan(schedule_chunks(stages, num_chunks)) == expected


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_schedule_chunks_respects_order_and_resources(parts, num_chunks: int) -> None:
    stages = chain([float(time) for time, _ in parts], [resource for _, resource in parts])
    slices = schedule_chunks(stages, num_chunks)
    assert len(slices) == len(stages) * num_chunks
    when = {(piece.chunk, piece.stage): piece for piece in slices}
    for (chunk, name), piece in when.items():
        stage = next(stage for stage in stages if stage.name == name)
        assert piece.end_s - piece.start_s == stage.seconds
        assert all(when[chunk, before].end_s <= piece.start_s for before in stage.after)
    load: dict[str, float] = {}
    for resource in "abc":
        own = [stage for stage in stages if stage.resources == (resource,)]
        names = {stage.name for stage in own}
        spans = sorted((p.start_s, p.end_s) for p in slices if p.stage in names)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        load[resource] = num_chunks * sum(stage.seconds for stage in own)
    total = makespan(slices)
    assert max(*load.values(), sum(stage.seconds for stage in stages)) <= total
    assert total <= num_chunks * sum(stage.seconds for stage in stages)


def test_dispatch_goes_before_combine_on_a_shared_nic() -> None:
    """There (2 s), expert (1 s), back (2 s): the NIC never rests, so 3 chunks take 3 * 4 s."""
    stages = chain([2.0, 1.0, 2.0], ["nic", "gpu", "nic"])
    slices = schedule_chunks(stages, 3)
    nic = [(p.chunk, p.stage) for p in slices if p.stage != "s1"]
    assert nic == [(0, "s0"), (1, "s0"), (2, "s0"), (0, "s2"), (1, "s2"), (2, "s2")]
    assert makespan(slices) == 12.0


def test_a_stage_may_hold_two_resources() -> None:
    stages = (
        Stage(name="flat", seconds=2.0, resources=("nic", "node")),
        Stage(name="spread", seconds=1.0, resources=("node",), after=("flat",)),
    )
    assert makespan(schedule_chunks(stages, 2)) == 6.0


def test_schedule_chunks_instructs() -> None:
    with pytest.raises(ConfigError, match="num_chunks must be at least 1, got 0"):
        schedule_chunks((), 0)
    late = (Stage(name="a", seconds=1.0, resources=(), after=("b",)),)
    with pytest.raises(
        ConfigError, match=r"a must come after the stages it waits for, got \['b'\]"
    ):
        schedule_chunks(late, 1)
    assert makespan(schedule_chunks((), 3)) == 0.0
