"""The writer of action lists: counts, owed weight gradients, names."""

from piper_kernels.pipeline.schedule_actions import Action, Schedule, Step, Writer


def names(writer: Writer) -> list[str]:
    return [str(step) for step in writer.steps]


def test_writer_counts_each_stage_and_kind() -> None:
    writer = Writer()
    writer.forward(0)
    writer.forward(3)
    writer.forward(0)
    writer.overlap(0, 3)
    writer.backward(3)
    assert names(writer) == ["0F0", "3F0", "0F1", "(0F2;3B0)OVERLAP_F_B", "3B1"]


def test_writer_pays_weight_gradients_oldest_first() -> None:
    writer = Writer()
    writer.backward(3, is_split=True)
    writer.backward(0, is_split=True)
    writer.backward(3, is_split=True)
    writer.weights(0)
    writer.weights()
    writer.weights()
    writer.weights()
    assert names(writer) == ["3I0", "0I0", "3I1", "0W0", "3W0", "3W1"]
    assert not writer.owed


def test_schedule_knows_a_ranks_stages() -> None:
    step = Step((Action(1, "F", 0),))
    schedule = Schedule(
        name="x", num_ranks=2, num_microbatches=1, stage_to_rank=(0, 1, 1, 0), steps=((step,), ())
    )
    assert schedule.num_stages == 4
    assert schedule.stages_of(0) == (0, 3)
