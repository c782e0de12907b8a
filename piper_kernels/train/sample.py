"""Text that the model writes."""

import torch
from torch import nn

from piper_kernels.train.evaluate import autocast
from piper_kernels.train.model import forward_logits
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.tokens import Tokens

TEMPERATURE = 0.7


@torch.no_grad()
def continue_text(
    model: nn.Module, tokens: Tokens, prompt: str, num_tokens: int, settings: TrainSettings
) -> str:
    """Continue ``prompt`` by ``num_tokens`` tokens, drawn at temperature ``TEMPERATURE``.

    Each token sees the last ``settings.sequence_length`` tokens. The draw has its own generator,
    seeded by ``settings.seed``: the training's random numbers are untouched, and the same model
    writes the same text.

    Returns:
        The continuation alone, without the prompt.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(settings.seed)
    ids = tokens.encode(prompt.encode("utf-8")).tolist()
    num_given = len(ids)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        context = torch.tensor([ids[-settings.sequence_length :]], device=device)
        with autocast(settings, device):
            logits, _ = forward_logits(model, context)
        # ids past the vocabulary of the text exist in the model only
        last = logits[0, -1, : tokens.vocab_size].float().cpu()
        probabilities = torch.softmax(last / TEMPERATURE, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(was_training)
    return tokens.decode(ids[num_given:])


def held_out_prompt(held_out: bytes, num_bytes: int = 120) -> str:
    """The beginning of a held-out text, cut at a word: what a sample may continue.

    Example:
        >>> held_out_prompt(b"The assert statement", num_bytes=12)
        'The assert '
    """
    text = held_out[:num_bytes].decode("utf-8", errors="ignore")
    cut = max(text.rfind(" "), text.rfind("\n")) + 1
    return text[:cut] or text
