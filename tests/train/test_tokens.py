from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import transformers

from piper_kernels.errors import DataError
from piper_kernels.train import tokens as tokens_module
from piper_kernels.train.corpus import load_corpus
from piper_kernels.train.evaluate import held_out_windows
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.tokens import ByteTokens, FolderTokens


@pytest.fixture(scope="module")
def tokenizer_folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 400 tokens, trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(text_file)], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    return folder


def test_byte_tokens_are_bytes() -> None:
    tokens = ByteTokens()
    assert tokens.encode("a\u00e9".encode()).tolist() == [97, 0xC3, 0xA9]
    assert tokens.decode([97, 0xC3, 0xA9]) == "a\u00e9"
    assert tokens.decode([97, 0xC3]) == "a\N{REPLACEMENT CHARACTER}"
    assert tokens.num_bytes(0xC3) == 1


def test_folder_tokens_round_trip_in_pieces(
    tokenizer_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = FolderTokens(tokenizer_folder)
    assert tokens.vocab_size == 400
    text = text_file.read_bytes() + "\u00e9 without a line end".encode()
    whole = tokens.encode(text)
    assert tokens.decode(whole.tolist()).encode() == text
    assert len(whole) < len(text) / 1.5
    monkeypatch.setattr(tokens_module, "_PIECE_BYTES", 1000)
    pieces = tokens.encode(text)
    assert tokens.decode(pieces.tolist()).encode() == text


def test_folder_tokens_refuses_what_is_no_tokenizer(tmp_path: Path, text_file: Path) -> None:
    message = "tokenizer must be a folder with a tokenizer, got .*none, which is no folder. Give a"
    with pytest.raises(DataError, match=message):
        FolderTokens(tmp_path / "none")
    with pytest.raises(DataError, match="tokenizer must be a folder with a tokenizer, got"):
        FolderTokens(tmp_path)


def test_load_corpus_counts_bytes_whatever_the_tokens(
    tiny_settings: Callable[..., TrainSettings], tokenizer_folder: Path
) -> None:
    corpus = load_corpus(tiny_settings(tokenizer=str(tokenizer_folder)))
    decoded = [corpus.tokens.decode(ids.tolist()).encode() for ids in corpus.train]
    assert decoded == list(corpus.train_texts)
    tokens = sum(map(len, corpus.train))
    assert corpus.tokens_per_byte == tokens / corpus.train_bytes < 0.7
    held_out = held_out_windows(corpus, 16)
    first = [corpus.tokens.num_bytes(int(ids[0])) for ids in corpus.held_out]
    assert held_out.scored_bytes == corpus.held_out_bytes - sum(first)
