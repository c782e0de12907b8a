"""Text to token ids and back: bytes by default, or a tokenizer saved in a local folder."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from piper_kernels.errors import DataError, instruction

# a tokenizer's time and memory per piece stay small
_PIECE_BYTES = 1 << 20


class Tokens(Protocol):
    """What the training run needs of a tokenizer."""

    vocab_size: int

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids of UTF-8 text, ``[N]`` int32."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 are shown as the replacement character."""

    def num_bytes(self, token: int) -> int:
        """Bytes of UTF-8 text that one token stands for."""


class ByteTokens:
    """Each byte is a token, 0 to 255: nothing to download, nothing out of vocabulary."""

    vocab_size = 256

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids of UTF-8 text, ``[N]`` int32."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 are shown as the replacement character."""
        return bytes(ids).decode("utf-8", errors="replace")

    def num_bytes(self, token: int) -> int:
        """1, whatever the token."""
        return 1


class FolderTokens:
    """A Hugging Face tokenizer in a local folder. No hub access, no remote code.

    Args:
        folder: what ``tokenizer.save_pretrained`` wrote.

    Raises:
        DataError: if the folder holds no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        remedy = "Give a folder that tokenizer.save_pretrained wrote."
        requirement = "be a folder with a tokenizer"
        if not folder.is_dir():
            value = f"{folder}, which is no folder"
            raise DataError(instruction("FolderTokens", "tokenizer", requirement, value, remedy))
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            value = f"{folder} ({reason})"
            message = instruction("FolderTokens", "tokenizer", requirement, value, remedy)
            raise DataError(message) from error
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: bytes) -> NDArray[np.int32]:
        """Token ids of UTF-8 text, ``[N]`` int32."""
        ids: list[int] = []
        for piece in _pieces(text):
            encoded = self._tokenizer(
                piece.decode("utf-8"), add_special_tokens=False, verbose=False
            )
            ids += encoded["input_ids"]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 are shown as the replacement character."""
        return str(self._tokenizer.decode(ids))

    def num_bytes(self, token: int) -> int:
        """Bytes of UTF-8 text that one token stands for."""
        return len(self.decode([token]).encode("utf-8"))


def _pieces(text: bytes) -> list[bytes]:
    """Cut at line ends into pieces of about ``_PIECE_BYTES``."""
    pieces: list[bytes] = []
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", start + _PIECE_BYTES)
        end = len(text) if line_end < 0 else line_end + 1
        pieces.append(text[start:end])
        start = end
    return pieces
