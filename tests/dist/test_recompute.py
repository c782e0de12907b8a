"""Plans on tape: replayed in order, and refused where the recomputation differs."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from piper_kernels.dist.recompute import PlanTape, checkpoint_contexts, current_tape
from piper_kernels.errors import RoutingError


def test_checkpoint_contexts_replay_in_order() -> None:
    seen: list[object] = []

    def layers(x: torch.Tensor) -> torch.Tensor:
        tape = current_tape.get()
        assert tape is not None
        for call in range(2):
            ids = torch.tensor([call])
            seen.append(tape.replay(ids))
            tape.record(ids, f"plan {call}")
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    # two regions under way at once do not share a tape
    first, second = (
        checkpoint(layers, x, use_reentrant=False, context_fn=checkpoint_contexts) for _ in range(2)
    )
    assert seen == [None] * 4
    (first + second).sum().backward()
    assert seen[4:] == ["plan 0", "plan 1"] * 2
    assert current_tape.get() is None


def test_plan_tape_refuses_another_routing() -> None:
    tape = PlanTape()
    tape.record(torch.tensor([1]), "plan")
    tape.position = 0
    with pytest.raises(RoutingError, match=r"call 1 of the recomputation must choose the experts"):
        tape.replay(torch.tensor([2]))
    with pytest.raises(RoutingError, match="call 2"):
        tape.replay(torch.tensor([1]))
