import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.train.entropy import ngram_entropies

TEXTS = st.lists(st.binary(min_size=0, max_size=30), min_size=1, max_size=3)


def probability(train: list[bytes], context: bytes, byte: int) -> float:
    """The definition of the docstring, by counting in dictionaries."""
    following = Counter(
        text[i + len(context)]
        for text in train
        for i in range(len(text) - len(context))
        if text[i : i + len(context)] == context
    )
    shorter = probability(train, context[1:], byte) if context else 1 / 256
    total, distinct = following.total(), len(following)
    if total == 0:
        return shorter
    return (following[byte] + distinct * shorter) / (total + distinct)


def test_ngram_entropies_by_hand() -> None:
    # counted: a 2, b 2; ab 2, ba 1; aba 1, bab 1. Scored: the b and the last a of "aba"
    result = ngram_entropies([b"abab"], [b"aba"])
    unigram = (2 + 2 / 256) / 6
    b_after_a, a_after_b = (2 + unigram) / 3, (1 + unigram) / 2
    a_after_ab = (1 + a_after_b) / 2
    assert result.uniform == pytest.approx(math.log(256))
    assert result.unigram == pytest.approx(-math.log(unigram))
    assert result.bigram == pytest.approx(-(math.log(b_after_a) + math.log(a_after_b)) / 2)
    assert result.trigram == pytest.approx(-(math.log(b_after_a) + math.log(a_after_ab)) / 2)


@given(train=TEXTS, held_out=st.lists(st.binary(min_size=2, max_size=20), min_size=1, max_size=3))
def test_ngram_entropies_follow_the_definition(train: list[bytes], held_out: list[bytes]) -> None:
    result = ngram_entropies(train, held_out)
    for order, value in ((1, result.unigram), (2, result.bigram), (3, result.trigram)):
        logs = [
            math.log(probability(train, text[max(0, i - order + 1) : i], text[i]))
            for text in held_out
            for i in range(1, len(text))
        ]
        assert value == pytest.approx(-sum(logs) / len(logs))


def test_ngram_probabilities_sum_to_one() -> None:
    train = [b"the cat", b"the hat"]
    for context in (b"", b"e", b"he", b"xy"):
        assert sum(probability(train, context, byte) for byte in range(256)) == pytest.approx(1.0)
