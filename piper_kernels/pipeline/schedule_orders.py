"""The order of passes on one rank under each schedule.

They are the orders of torch.distributed.pipelining 2.13 without idle slots; a test compares them.
Letters: P ranks, M microbatches, V stages a rank.

Pure: no torch, no process group.
"""

from piper_kernels.pipeline.schedule_actions import Step, Writer


def gpipe(rank: int, num_microbatches: int) -> list[Step]:
    """All forwards, then all backwards.

    Source: Huang et al. 2019 (1811.06965).
    """
    writer = Writer()
    for _ in range(num_microbatches):
        writer.forward(rank)
    for _ in range(num_microbatches):
        writer.backward(rank)
    return writer.steps


def one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """P - 1 - rank forwards ahead, then one forward and one backward in turn.

    Source: Narayanan et al. 2021 (2006.09503), PipeDream-Flush.
    """
    stages = [rank] * num_microbatches
    return _alternate(stages, stages, num_ahead=num_ranks - 1 - rank)


def interleaved(rank: int, num_ranks: int, num_local: int, num_microbatches: int) -> list[Step]:
    """V stages a rank, P apart; earlier microbatches first, in rounds of about P.

    Source: Narayanan et al. 2021 (2104.04473); torch allows rounds of other sizes than P.
    """
    in_round = num_microbatches // num_rounds(num_ranks, num_microbatches)
    total = num_local * num_microbatches
    locals_ = [(step // in_round) % num_local for step in range(total)]
    forward_stages = [local * num_ranks + rank for local in locals_]
    backward_stages = [(num_local - 1 - local) * num_ranks + rank for local in locals_]
    num_ahead = (num_local - 1) * in_round + 2 * (num_ranks - 1 - rank)
    return _alternate(forward_stages, backward_stages, num_ahead=min(num_ahead, total))


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Rounds of an interleaved schedule: the microbatches must be a multiple of them.

    Example:
        >>> num_rounds(4, 10), num_rounds(4, 3)
        (2, 1)
    """
    return max(1, num_microbatches // num_ranks)


def _alternate(forward: list[int], backward: list[int], *, num_ahead: int) -> list[Step]:
    """Some forwards ahead, then a forward and a backward in turn, then the backwards left."""
    writer = Writer()
    for stage in forward[:num_ahead]:
        writer.forward(stage)
    later = forward[num_ahead:]
    for ahead, back in zip(later, backward, strict=False):
        writer.forward(ahead)
        writer.backward(back)
    for stage in backward[len(later) :]:
        writer.backward(stage)
    return writer.steps


def zbv(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """Zero bubble on a V: stage ``rank`` on the way down, its mirror image on the way up.

    The order is that for at least 2P - 1 microbatches; those that do not exist are left out.

    Source: Qi et al. 2024 (2405.15362), ZB-V; torch's ScheduleZBVZeroBubble.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    full, below = max(2 * num_ranks - 1, num_microbatches), num_ranks - rank
    writer = Writer()

    def back(stage: int) -> None:
        writer.backward(stage, is_split=True)
        writer.weights(stage)

    for _ in range(2 * below - 1):
        writer.forward(down)
    for _ in range(rank):
        writer.forward(up)
        writer.forward(down)
    for _ in range(below):
        writer.forward(up)
        back(up)
    ahead_down, ahead_up = 2 * below - 1 + rank, rank + below
    while ahead_up < ahead_down or ahead_down < full:
        if ahead_down < full:
            writer.forward(down)
            ahead_down += 1
        back(down)
        writer.forward(up)
        ahead_up += 1
        back(up)
    for _ in range(rank):
        writer.backward(down, is_split=True)
        writer.backward(up, is_split=True)
    for _ in range(below):
        writer.backward(down, is_split=True)
        writer.weights(down)
    for stage in (up, down):
        for _ in range(sum(owner == stage for owner, _ in writer.owed)):
            writer.weights(stage)
    return [step for step in writer.steps if step.actions[0].microbatch < num_microbatches]


def dual_pipe_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Step]:
    """DualPipe on a V: a forward overlaps a backward; weight gradients fill the last bubbles.

    Source: DeepSeek-V3 (2412.19437) and deepseek-ai/DualPipe; torch's ScheduleDualPipeV.
    """
    down, up, below = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    writer = Writer()
    for _ in range(2 * below):
        writer.forward(down)
    for _ in range(rank + 1):
        writer.forward(down)
        writer.forward(up)
    for _ in range(below):
        writer.backward(up, is_split=True)
        writer.weights()
        writer.forward(up)
    for turn in range(num_microbatches - 2 * num_ranks + rank + 1):
        if turn == 0 and below == 0:
            # the last rank has nothing to hide the first backward behind
            writer.forward(down)
            writer.backward(up)
        else:
            writer.overlap(down, up)
        writer.overlap(up, down)
    for _ in range(below):
        writer.backward(up)
        writer.overlap(up, down)
    _drain_dual_pipe(writer, rank, num_ranks)
    return writer.steps


def _drain_dual_pipe(writer: Writer, rank: int, num_ranks: int) -> None:
    """The backwards that are left, the later half of them split."""
    down, up, below = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    # backwards of both stages in turn; the second half, from an odd or even one on, is split
    first_split = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    for turn in range(2 * (rank + 1)):
        writer.backward(down if turn % 2 else up, is_split=turn >= first_split)
    for _ in range(below):
        writer.weights()
        writer.backward(down, is_split=True)
    for _ in range(rank + 1):
        writer.weights()
