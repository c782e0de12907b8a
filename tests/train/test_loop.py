from collections.abc import Callable

import pytest
import torch

from piper_kernels.errors import TrainingError
from piper_kernels.train.loop import Trainer
from piper_kernels.train.metrics import StepRecord
from piper_kernels.train.optimizer import learning_rate

Make = Callable[..., Trainer]


def train(trainer: Trainer) -> tuple[Trainer, list[StepRecord]]:
    return trainer, [trainer.train_step() for _ in range(trainer.settings.steps)]


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def watch_gradient(trainer: Trainer) -> list[torch.Tensor]:
    """A list that gets the whole gradient of each step, as the optimizer sees it."""
    seen: list[torch.Tensor] = []

    def note(*_: object) -> None:
        parameters = trainer.model.parameters()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))

    trainer.optimizer.register_step_pre_hook(note)
    return seen


def test_train_step_learns_and_reports(make_trainer: Make) -> None:
    trainer, records = train(make_trainer(steps=30, learning_rate=1e-2))
    assert records[-1].loss < records[0].loss - 1.0
    assert [record.step for record in records] == list(range(1, 31))
    assert records[4].tokens == 5 * 4 * 16
    assert records[4].learning_rate == learning_rate(5, trainer.settings)
    # each of 64 tokens goes to 2 of 4 experts, in both layers
    assert [sum(row) for row in records[4].expert_counts] == [128, 128]
    assert records[0].balance_loss == pytest.approx(2.0, rel=0.2)
    assert trainer.samples_drawn == 120


def test_train_step_accumulates_to_the_big_batch(make_trainer: Make) -> None:
    # the balance loss alone is a mean over microbatches, so it stays out of this comparison
    whole = make_trainer(balance_loss_weight=0.0)
    cut = make_trainer(balance_loss_weight=0.0, accumulate=4)
    gradients = [watch_gradient(whole), watch_gradient(cut)]
    for _ in range(3):
        one, other = whole.train_step(), cut.train_step()
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert other.expert_counts == one.expert_counts
        assert one.balance_loss is None
    difference = (gradients[0][0] - gradients[1][0]).norm() / gradients[0][0].norm()
    assert difference < 1e-6


def test_train_step_with_balance_loss_evens_the_experts(make_trainer: Make) -> None:
    common = {"steps": 60, "learning_rate": 1e-2}
    _, without = train(make_trainer(**common, balance_loss_weight=0.0))
    _, strong = train(make_trainer(**common, balance_loss_weight=0.3))
    tail = slice(-20, None)
    mean = [sum(max(r.imbalance) for r in records[tail]) / 20 for records in (without, strong)]
    assert mean[1] < mean[0]


def test_train_step_recomputes_activations_to_the_same_weights(make_trainer: Make) -> None:
    # the balance loss hangs on router logits inside the checkpointed layers
    kept, kept_records = train(make_trainer(balance_loss_weight=0.5))
    again, again_records = train(make_trainer(balance_loss_weight=0.5, checkpoint_activations=True))
    torch.testing.assert_close(weights_of(again), weights_of(kept), rtol=1e-6, atol=1e-7)
    assert [r.expert_counts for r in again_records] == [r.expert_counts for r in kept_records]


def test_train_step_in_bf16_keeps_weights_and_moments_in_fp32(make_trainer: Make) -> None:
    trainer, records = train(make_trainer(precision="bf16", steps=30, learning_rate=1e-2))
    assert records[-1].loss < records[0].loss - 1.0
    state = trainer.optimizer.state
    for parameter in trainer.model.parameters():
        assert parameter.dtype == state[parameter]["exp_avg"].dtype == torch.float32
    exact = make_trainer()
    rounded = make_trainer(precision="bf16")
    difference = abs(exact.train_step().loss - rounded.train_step().loss)
    assert 0 < difference < 0.02


def test_train_step_clips_the_gradient(make_trainer: Make) -> None:
    trainer = make_trainer(clip_norm=1e-3)
    gradients = watch_gradient(trainer)
    record = trainer.train_step()
    assert record.grad_norm > 0.1
    assert gradients[0].norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("weight", "train_step: loss of step 2 must be a finite number, got nan. Start"),
        ("gradient", "train_step: grad_norm of step 2 must be a finite number, got inf. Start"),
    ],
)
def test_train_step_stops_at_what_is_not_finite(
    make_trainer: Make, spoil: str, message: str
) -> None:
    trainer = make_trainer()
    trainer.train_step()
    head = trainer.model.lm_head.weight
    if spoil == "weight":
        head.data[0, 0] = torch.nan
    else:
        head.register_hook(lambda gradient: gradient * torch.inf)
    before = weights_of(trainer)
    with pytest.raises(TrainingError, match=message):
        trainer.train_step()
    assert torch.equal(weights_of(trainer).nan_to_num(), before.nan_to_num())
    assert trainer.step == 1
