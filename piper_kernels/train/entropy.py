"""What counting alone achieves on the held-out text: the yardstick for a language model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramEntropies:
    """Cross-entropies of byte models on held-out text, in nats per byte."""

    uniform: float
    unigram: float
    bigram: float
    trigram: float


def ngram_entropies(train: Sequence[bytes], held_out: Sequence[bytes]) -> NgramEntropies:
    """Count bytes, pairs and triples in ``train`` and score ``held_out`` with them.

    Smoothing is interpolated Witten-Bell: after a context c that was followed n times, by d
    different bytes, ``P(b | c) = (count(c, b) + d * P(b | shorter c)) / (n + d)``; the shortest
    context backs off to 1/256. Scored are all bytes but the first of each held-out text, as for a
    language model; contexts do not cross texts, so a text's second byte has a context of one.

    Args:
        train: texts to count in.
        held_out: texts to score, at least one of two bytes or more.

    Example:
        >>> result = ngram_entropies([b"abab"], [b"ab"])
        >>> round(result.unigram, 6) == round(-math.log((2 + 2 / 256) / (4 + 2)), 6)
        True

    Source: Witten and Bell 1991, method C, interpolated as in Chen and Goodman 1999, section 2.7.
    """
    texts = [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in held_out]
    probabilities = [np.full(len(text), 1.0 / 256) for text in texts]
    entropies = []
    for order in (1, 2, 3):
        counts = _count(train, order)
        for text, probability in zip(texts, probabilities, strict=True):
            _refine(probability, text, counts, order)
        scored = np.concatenate([probability[1:] for probability in probabilities])
        entropies.append(float(-np.log(scored).mean()))
    unigram, bigram, trigram = entropies
    return NgramEntropies(uniform=math.log(256), unigram=unigram, bigram=bigram, trigram=trigram)


def _count(texts: Sequence[bytes], order: int) -> NDArray[np.int64]:
    """How often each byte followed each context of ``order - 1`` bytes, ``[contexts, 256]``."""
    counts = np.zeros(256**order, dtype=np.int64)
    for text in texts:
        codes = _codes(np.frombuffer(text, dtype=np.uint8).astype(np.int64), order)
        present, times = np.unique(codes, return_counts=True)
        counts[present] += times
    return counts.reshape(-1, 256)


def _codes(text: NDArray[np.int64], order: int) -> NDArray[np.int64]:
    """Each run of ``order`` bytes as one number, first byte highest."""
    length = max(0, len(text) - order + 1)
    codes = np.zeros(length, dtype=np.int64)
    for place in range(order):
        codes = codes * 256 + text[place : place + length]
    return codes


def _refine(
    probability: NDArray[np.float64],
    text: NDArray[np.int64],
    counts: NDArray[np.int64],
    order: int,
) -> None:
    """Replace, in place, the shorter context's probabilities where a context of this order fits."""
    codes = _codes(text, order)
    contexts, following = codes // 256, codes % 256
    rows, row_of = np.unique(contexts, return_inverse=True)
    total = counts[rows].sum(axis=1)[row_of]
    distinct = (counts[rows] > 0).sum(axis=1)[row_of]
    shorter = probability[order - 1 :]
    seen = (counts[contexts, following] + distinct * shorter) / np.maximum(total + distinct, 1)
    probability[order - 1 :] = np.where(total > 0, seen, shorter)
