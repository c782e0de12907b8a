"""The text as a run sees it: what is trained on, what is held out, its tokens and its hash."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from piper_kernels.errors import DataError, instruction
from piper_kernels.train.data import drop_repeated_paragraphs, read_documents
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.tokens import ByteTokens, FolderTokens, Tokens

BLOCK_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus:
    """A text, split and tokenised.

    Attributes:
        tokens: how text becomes token ids.
        train_texts: runs of consecutive text, UTF-8; never across a held-out block.
        held_out_texts: blocks of consecutive text that are only evaluated.
        train: token ids of each of ``train_texts``, ``[N_i]`` int32.
        held_out: token ids of each of ``held_out_texts``, ``[N_i]`` int32.
        sha256: hash of the whole text, in order.
    """

    tokens: Tokens
    train_texts: tuple[bytes, ...]
    held_out_texts: tuple[bytes, ...]
    train: tuple[NDArray[np.int32], ...]
    held_out: tuple[NDArray[np.int32], ...]
    sha256: str

    @property
    def train_bytes(self) -> int:
        """Bytes of text to train on."""
        return sum(map(len, self.train_texts))

    @property
    def held_out_bytes(self) -> int:
        """Bytes of text to evaluate."""
        return sum(map(len, self.held_out_texts))

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of the text to train on; 1.0 for byte tokens."""
        return sum(map(len, self.train)) / self.train_bytes


def load_corpus(settings: TrainSettings) -> Corpus:
    """Read, clean, split and tokenise the text that the settings name.

    Raises:
        DataError: if the text cannot be read, or is too short for one sequence.
    """
    documents = read_documents(settings.data, settings.text_field)
    if not settings.keep_repeats:
        documents = drop_repeated_paragraphs(documents)
    text = "\n\n".join(documents).encode("utf-8")
    tokens = FolderTokens(settings.tokenizer) if settings.tokenizer else ByteTokens()
    train_texts, held_out_texts = split_text(text, settings.held_out_fraction)
    corpus = Corpus(
        tokens=tokens,
        train_texts=tuple(train_texts),
        held_out_texts=tuple(held_out_texts),
        train=tuple(map(tokens.encode, train_texts)),
        held_out=tuple(map(tokens.encode, held_out_texts)),
        sha256=hashlib.sha256(text).hexdigest(),
    )
    longest = max(map(len, corpus.train), default=0)
    shortest = min(map(len, corpus.held_out), default=0)
    if longest <= settings.sequence_length or shortest < 2:
        need = f"hold a sequence of {settings.sequence_length + 1} tokens beside its held-out part"
        value = f"{len(text)} bytes, {longest} tokens in a row"
        remedy = "Give more text, or lower --sequence-length."
        raise DataError(instruction("load_corpus", "data", need, value, remedy))
    return corpus


def split_text(
    text: bytes, held_out_fraction: float, block_bytes: int = BLOCK_BYTES
) -> tuple[list[bytes], list[bytes]]:
    r"""Hold out one block in ``N = round(1 / held_out_fraction)``; train on the runs between.

    Blocks are consecutive text of about ``block_bytes`` (less if the text is shorter than N
    blocks) and end at a line end, so that neighbouring sentences stay on one side.

    Args:
        text: UTF-8.
        held_out_fraction: in (0, 0.5].
        block_bytes: length of a block.

    Returns:
        ``(train_texts, held_out_texts)``; together they are the text.

    Example:
        >>> split_text(b"a\nb\nc\nd\n", 0.5, block_bytes=2)
        ([b'a\n', b'c\n'], [b'b\n', b'd\n'])
    """
    cycle = round(1 / held_out_fraction)
    num_cycles = max(1, len(text) // (cycle * block_bytes))
    num_blocks = cycle * num_cycles
    cuts = [_line_end(text, len(text) * index // num_blocks) for index in range(num_blocks + 1)]
    train_texts, held_out_texts = [], []
    train_start = 0
    for index in range(cycle // 2, num_blocks, cycle):
        start, end = cuts[index], cuts[index + 1]
        train_texts.append(text[train_start:start])
        held_out_texts.append(text[start:end])
        train_start = end
    train_texts.append(text[train_start:])
    return [run for run in train_texts if run], [block for block in held_out_texts if block]


def _line_end(text: bytes, position: int) -> int:
    """The first position from here on that follows a line end; the text's end if none does."""
    if position == 0:
        return 0
    line_end = text.find(b"\n", position - 1)
    return len(text) if line_end < 0 else line_end + 1
