import math
from collections.abc import Callable

import pytest
import torch

from piper_kernels.pipeline.token_loss import IGNORED, summed_cross_entropy
from piper_kernels.train.corpus import load_corpus
from piper_kernels.train.evaluate import (
    autocast,
    held_out_loss,
    held_out_windows,
)
from piper_kernels.train.model import build_model
from piper_kernels.train.settings import TrainSettings

Make = Callable[..., TrainSettings]
CPU = torch.device("cpu")


def test_held_out_windows_score_every_byte_but_the_first_of_a_block(tiny_settings: Make) -> None:
    corpus = load_corpus(tiny_settings())
    held_out = held_out_windows(corpus, 16)
    targets = held_out.windows[:, 1:]
    scored = targets[targets != IGNORED].tolist()
    assert scored == [byte for block in corpus.held_out_texts for byte in block[1:]]
    assert held_out.scored_bytes == len(scored) == corpus.held_out_bytes - len(corpus.held_out)
    # each window goes on where the one before ended
    assert torch.equal(held_out.windows[1, :1], held_out.windows[0, -1:])
    assert (held_out.windows[:, 0] != IGNORED).all()


def test_held_out_loss_is_the_mean_over_bytes(tiny_settings: Make) -> None:
    settings = tiny_settings()
    corpus = load_corpus(settings)
    model = build_model(settings, 256, CPU)
    held_out = held_out_windows(corpus, 16)
    state = torch.get_rng_state()
    loss = held_out_loss(model, held_out, settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    # the same, window by window and without padding
    total = 0.0
    for block in corpus.held_out:
        for start in range(0, len(block) - 1, 16):
            ids = torch.from_numpy(block[start : start + 17].astype("int64"))
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1]).logits[0].double()
            total -= logits.log_softmax(-1).gather(1, ids[1:, None]).sum().item()
    assert loss == pytest.approx(total / held_out.scored_bytes, rel=1e-5)
    # an untrained model knows nothing
    assert loss == pytest.approx(math.log(256), rel=0.05)


def test_summed_cross_entropy_is_fp32_and_skips_ignored() -> None:
    logits = torch.tensor([[[0.0, 0.0], [5.0, 0.0]]], dtype=torch.bfloat16)
    loss = summed_cross_entropy(logits, torch.tensor([[1, IGNORED]]))
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(2))


def test_autocast_follows_the_precision(tiny_settings: Make) -> None:
    a = torch.ones(2, 2)
    with autocast(tiny_settings(precision="bf16"), CPU):
        assert (a @ a).dtype == torch.bfloat16
    with autocast(tiny_settings(precision="fp32"), CPU):
        assert (a @ a).dtype == torch.float32
