"""What the ledger's tests share: counted launches against the ledger's lines."""

from collections.abc import Sequence

import pytest

from piper_kernels.cost.ragged import RaggedRows
from piper_kernels.cost.traffic import Traffic
from piper_kernels.permutation import Permutation
from piper_kernels.testing.kernel_traffic import LaunchTraffic


def rows_of(permutation: Permutation) -> RaggedRows:
    """The ledger's view of a permutation."""
    num_valid = int(permutation.expert_offsets[-1])
    return RaggedRows(
        permutation.num_tokens,
        permutation.top_k,
        permutation.expert_counts.long().numpy(),
        permutation.row_to_token[:num_valid].long().numpy(),
    )


def assert_counted(launches: Sequence[LaunchTraffic], traffic: Traffic, what: str) -> None:
    """A ledger's line is exactly what its launches loaded and stored."""
    names = [launch.kernel for launch in launches]
    issued = sum(launch.issued_bytes for launch in launches)
    compulsory = sum(launch.compulsory_bytes for launch in launches)
    assert (issued, compulsory) == (traffic.issued, traffic.compulsory), f"{what}: {names}"


@pytest.fixture
def ledger_rows():
    return rows_of


@pytest.fixture
def check_counted():
    return assert_counted
