"""A rank dies, stops or raises in any phase: every survivor says so in time, with names."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper_kernels import PiperMoE
from piper_kernels.dist import ExchangeGroup, ExpertParallel, all_to_all_single, messages
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import TransferError
from piper_kernels.testing import rank_outcomes

TIMEOUT_S, VICTIM = 1.0, 2
NAMED = r"^rank (\d) on (node\d), phase (counts|flat|I|II|III): .*rank (\d) on node\d"


def misbehave(event: str) -> None:
    if event == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("boom")


def arm(event: str, phase: str, after: int) -> None:
    """Misbehave instead of posting the messages of the phase for the n-th time."""
    before = messages.Posted.__init__
    seen = 0

    def post(self: Any, exchange: Any, name: str, *rest: Any) -> None:
        nonlocal seen
        seen += name == phase
        if seen > after:
            misbehave(event)
        before(self, exchange, name, *rest)

    messages.Posted.__init__ = post  # type: ignore[method-assign]


def exchange_until_error(event: str, phase: str, kind: str) -> tuple[str, float]:
    rank = dist.get_rank()
    # every pair has talked before, as in a job that runs
    dist.barrier()
    topology = frontier(1).lay_out((2, 2))
    exchange = ExchangeGroup(None, topology, timeout_s=TIMEOUT_S)
    moe = PiperMoE(4, 3, 8, 3, ep=ExpertParallel(exchange, exchange="halo_dedup"))
    if rank == VICTIM:
        # in the layer's backward the phases come again, turned round
        arm(event, phase, after=2 if kind == "layer" else 1)
    started = time.monotonic()
    try:
        for _ in range(4):
            started = time.monotonic()
            if kind == "layer":
                moe(torch.randn(16, 4)).sum().backward()
            else:
                algorithm: Any = "flat" if phase == "flat" else "halo"
                rows = torch.ones(8, 2)
                all_to_all_single(torch.empty_like(rows), rows, group=exchange, algorithm=algorithm)
    except TransferError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def check_survivors(event: str, phase: str, kind: str) -> None:
    outcomes = rank_outcomes(exchange_until_error, 4, event, phase, kind, timeout_s=4.5)
    wanted = {"kill": "died", "stop": "hung", "raise": "raised"}[event]
    assert outcomes[VICTIM].kind == wanted, outcomes[VICTIM]
    named = []
    for rank in (0, 1, 3):
        assert outcomes[rank].kind == "returned", outcomes[rank]
        message, seconds = outcomes[rank].result
        match = re.match(NAMED, message)
        assert match, message
        assert match[1] == str(rank)
        assert match[2] == f"node{rank // 2}"
        # a rank whose peer gave up waits for that peer once more
        assert seconds < 3 * TIMEOUT_S + 0.5
        named.append(int(match[4]))
    assert VICTIM in named, "nobody names the culprit"


@pytest.mark.parametrize(
    ("event", "phase", "kind"),
    [("kill", "II", "rows"), ("stop", "III", "layer")],
)
def test_exchange_names_the_phase_in_which_a_peer_fails(event: str, phase: str, kind: str) -> None:
    check_survivors(event, phase, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "layer"])
@pytest.mark.parametrize("phase", ["counts", "flat", "I", "II", "III"])
@pytest.mark.parametrize("event", ["kill", "stop", "raise"])
def test_exchange_faults_in_every_phase(event: str, phase: str, kind: str) -> None:
    if (phase, kind) == ("flat", "layer"):
        pytest.skip("this layer's exchange has no flat phase")
    check_survivors(event, phase, kind)
