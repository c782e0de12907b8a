"""Stated peak numbers are in base units and plausible."""

from bench.machines import MACHINES


def test_machines_have_plausible_ridges_and_differ() -> None:
    for machine in MACHINES:
        assert 100 < machine.ridge < 400, machine.name
        assert 1e6 < machine.memory.cache_bytes < 1e9
        assert machine.memory.num_programs == machine.num_processors
    assert len({machine.name for machine in MACHINES}) == len(MACHINES)
