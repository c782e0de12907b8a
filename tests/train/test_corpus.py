import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.errors import DataError
from piper_kernels.train.corpus import Corpus, load_corpus, split_text
from piper_kernels.train.data import drop_repeated_paragraphs, standard_library_topics
from piper_kernels.train.settings import TrainSettings

TEXT = st.text(st.sampled_from("ab\n\u00e9\U0001f600"), min_size=1, max_size=400)


@given(text=TEXT, cycle=st.integers(2, 7), block_bytes=st.integers(1, 40))
def test_split_text_gives_every_line_to_one_side(text: str, cycle: int, block_bytes: int) -> None:
    data = text.encode()
    train, held_out = split_text(data, 1 / cycle, block_bytes)
    assert b"" not in train + held_out
    assert sum(map(len, train + held_out)) == len(data)
    lines = sorted(line for piece in train + held_out for line in piece.splitlines(True))
    assert lines == sorted(data.splitlines(True))
    for piece in train + held_out:
        piece.decode()


def test_split_text_holds_out_the_middle_block_of_each_cycle() -> None:
    text = b"".join(b"%02d\n" % number for number in range(20))
    train, held_out = split_text(text, 0.2, block_bytes=6)
    # 10 blocks of 2 lines, in two cycles of 5
    assert held_out == [b"04\n05\n", b"14\n15\n"]
    assert b"".join(train) == text.replace(b"04\n05\n", b"").replace(b"14\n15\n", b"")
    assert train[1] == b"06\n07\n08\n09\n10\n11\n12\n13\n"


def test_load_corpus_holds_out_a_tenth_of_the_default_text_unseen() -> None:
    corpus = load_corpus(TrainSettings())
    share = corpus.held_out_bytes / (corpus.held_out_bytes + corpus.train_bytes)
    assert 0.08 < share < 0.12
    text = "\n\n".join(drop_repeated_paragraphs(standard_library_topics())).encode()
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    assert corpus.tokens_per_byte == 1.0
    assert [bytes(ids.astype(np.uint8)) for ids in corpus.held_out] == list(corpus.held_out_texts)
    repeating = load_corpus(TrainSettings(keep_repeats=True))
    assert repeating.train_bytes > corpus.train_bytes
    assert repeating.sha256 != corpus.sha256
    # the topics share passages: kept, a third of the held-out text would have been trained on
    assert share_seen(repeating) > 0.25
    assert share_seen(corpus) < share_seen(repeating) / 5


def share_seen(corpus: Corpus) -> float:
    """Share of held-out passages of 128 bytes that occur in the training text."""
    trained = b"\0".join(corpus.train_texts)
    texts = corpus.held_out_texts
    passages = [text[i : i + 128] for text in texts for i in range(0, len(text) - 128, 64)]
    return sum(passage in trained for passage in passages) / len(passages)


def test_load_corpus_wants_one_sequence(
    tiny_settings: Callable[..., TrainSettings], tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("one\ntwo\nthree\n")
    message = (
        "data must hold a sequence of 17 tokens beside its held-out part, got 14 bytes, "
        "[0-9]* tokens in a row. Give more text, or lower --sequence-length."
    )
    with pytest.raises(DataError, match=message):
        load_corpus(tiny_settings(data=[str(file)]))
    file.write_text("")
    with pytest.raises(DataError, match="got 0 bytes, 0 tokens in a row"):
        load_corpus(tiny_settings(data=[str(file)]))
