from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from piper_kernels.train.loop import Trainer
from piper_kernels.train.sample import continue_text, held_out_prompt
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.tokens import ByteTokens


class NextLetter(nn.Module):
    """Predicts, with certainty, the byte after the last one; remembers how much it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.weight = nn.Parameter(torch.zeros(1))
        self.longest = 0

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        assert not torch.is_grad_enabled()
        assert not self.training
        self.longest = max(self.longest, input_ids.shape[1])
        # the model's vocabulary is wider than the text's, and likes what is beyond it
        logits = torch.full((1, input_ids.shape[1], 300), -1e9)
        logits[..., 256:] = 2e9
        logits.scatter_(2, input_ids[..., None] + 1, 1e9)
        return SimpleNamespace(logits=logits)


def test_continue_text_follows_the_model_within_its_window() -> None:
    model = NextLetter()
    settings = TrainSettings(sequence_length=5)
    assert continue_text(model, ByteTokens(), "xyz abc", 6, settings) == "defghi"
    assert model.longest == 5
    assert model.training


def test_continue_text_leaves_the_generator_and_repeats_itself(
    make_trainer: Callable[..., Trainer],
) -> None:
    trainer = make_trainer()
    state = torch.get_rng_state()
    settings = trainer.settings
    texts = [continue_text(trainer.model, ByteTokens(), "The ", 20, settings) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0


def test_held_out_prompt_ends_at_a_word() -> None:
    assert held_out_prompt(b"one two three", num_bytes=9) == "one two "
    assert held_out_prompt(b"one\ntwo", num_bytes=5) == "one\n"
    assert held_out_prompt(b"abcdef", num_bytes=4) == "abcd"
    # never half a character
    assert held_out_prompt("\u00e9\u00e9".encode(), num_bytes=3) == "\u00e9"
