"""Loss on the held-out text, in nats per byte whatever the tokens are."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from piper_kernels.pipeline.token_loss import IGNORED, summed_cross_entropy
from piper_kernels.train.corpus import Corpus
from piper_kernels.train.model import forward_logits
from piper_kernels.train.settings import TrainSettings


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """The held-out text as windows.

    Attributes:
        windows: ``[N, S + 1]`` int64 token ids; each token but the first of a block is a target
            exactly once. Padding is ``IGNORED``.
        scored_bytes: bytes of text that the targets stand for.
    """

    windows: Tensor
    scored_bytes: int


def held_out_windows(corpus: Corpus, sequence_length: int) -> HeldOut:
    """Cut each held-out block into windows that overlap by one token; pad the last.

    A window starts without context, so the loss is an upper bound of what the model could reach
    with a longer memory.
    """
    windows: list[NDArray[np.int64]] = []
    scored_bytes = corpus.held_out_bytes
    for block in corpus.held_out:
        scored_bytes -= corpus.tokens.num_bytes(int(block[0]))
        windows += _windows(block, sequence_length)
    return HeldOut(windows=torch.from_numpy(np.stack(windows)), scored_bytes=scored_bytes)


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: HeldOut, settings: TrainSettings) -> float:
    """Cross-entropy of the held-out text, nats per byte. Uses no random numbers."""
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    was_training = model.training
    model.eval()
    for batch in held_out.windows.split(settings.microbatch_size):
        window = batch.to(device)
        # padding may be any token: no earlier position sees it
        inputs = window[:, :-1].clamp(min=0)
        with autocast(settings, device):
            logits, _ = forward_logits(model, inputs)
        total += summed_cross_entropy(logits, window[:, 1:]).cpu()
    model.train(was_training)
    return float(total) / held_out.scored_bytes


def autocast(settings: TrainSettings, device: torch.device) -> torch.autocast:
    """The context that ``settings.precision`` asks for: bfloat16 autocast, or none."""
    is_bf16 = settings.precision == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16)


def _windows(block: NDArray[np.int32], sequence_length: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(block) - 1, sequence_length):
        tokens = block[start : start + sequence_length + 1]
        window = np.full(sequence_length + 1, IGNORED, dtype=np.int64)
        window[: len(tokens)] = tokens
        yield window
