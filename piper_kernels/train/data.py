"""Documents to train on: what every Python carries, or text files, folders and JSON lines."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from piper_kernels.errors import DataError, did_you_mean, instruction, require

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_MAX_SHOWN_KEYS = 20
_BLANK_LINES = re.compile(r"(?:\r?\n){2,}")


def read_documents(paths: Sequence[Path], text_field: str) -> list[str]:
    """Read all documents: one per file, one per line of a ``.jsonl`` file.

    Args:
        paths: files, or folders that are searched for ``TEXT_SUFFIXES``, in sorted order; none
            means ``standard_library_topics()``.
        text_field: the key that holds the text in ``.jsonl`` lines.

    Raises:
        DataError: naming the file, and the line or byte, that cannot be read.
    """
    if not paths:
        return standard_library_topics()
    documents: list[str] = []
    for file in _files(paths):
        text = _decode(file)
        documents += _json_lines(file, text, text_field) if file.suffix == ".jsonl" else [text]
    return [document for document in documents if document.strip()]


def standard_library_topics() -> list[str]:
    """The language reference that ``help()`` shows: about 460 kB of English in every Python.

    Raises:
        DataError: if this Python was stripped of its documentation topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        remedy = "Give text files with --data."
        message = instruction(
            "standard_library_topics", "this Python", "carry pydoc_data.topics", "none", remedy
        )
        raise DataError(message) from None
    return [text for _, text in sorted(topics.items())]


def drop_repeated_paragraphs(documents: Iterable[str]) -> list[str]:
    r"""Keep the first copy of each paragraph, so that held-out text was not trained on.

    The standard library's topics share many passages: 20 % of their paragraphs are copies.

    Example:
        >>> drop_repeated_paragraphs(["a\n\nb", "b\n\nc"])
        ['a\n\nb', 'c']
    """
    seen: set[str] = set()
    kept: list[str] = []
    for document in documents:
        fresh: list[str] = []
        for paragraph in _BLANK_LINES.split(document):
            if paragraph not in seen:
                seen.add(paragraph)
                fresh.append(paragraph)
        if fresh:
            kept.append("\n\n".join(fresh))
    return kept


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not _is_folder(path):
            yield path
            continue
        found = _text_files(path)
        suffixes = ", ".join(TEXT_SUFFIXES)
        require(
            bool(found),
            "read_documents",
            "data",
            f"be a folder with files that end in {suffixes}",
            f"{path} without any",
            error=DataError,
        )
        yield from found


def _text_files(folder: Path) -> list[Path]:
    """Files below a folder that end in ``TEXT_SUFFIXES``, sorted; hidden ones are left out."""
    try:
        return sorted(
            file
            for file in folder.rglob("*")
            if file.suffix in TEXT_SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
            and file.is_file()
        )
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    # e.g. a name that is too long
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    value = f"{path} ({error.strerror or error})"
    return DataError(instruction("read_documents", "data", "be readable", value))


def _decode(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        value = f"{file}, where byte {error.start} is 0x{data[error.start]:02x}"
        remedy = "Convert it to UTF-8, or leave it out."
        raise DataError(
            instruction("read_documents", "data", "be UTF-8 text", value, remedy)
        ) from None
    at = text.find("\0")
    value = f"{file}, which holds a NUL character at {at}"
    remedy = "Leave binary files out."
    require(at < 0, "read_documents", "data", "be text", value, remedy, error=DataError)
    return text


def _json_lines(file: Path, text: str, text_field: str) -> list[str]:
    # not splitlines(): a JSON string may hold characters that it takes for line ends
    lines = enumerate(text.split("\n"), start=1)
    return [_json_text(file, number, line, text_field) for number, line in lines if line.strip()]


def _json_text(file: Path, number: int, line: str, text_field: str) -> str:
    where = f"line {number} of {file}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        value = f"{error.msg} at column {error.colno}"
        raise DataError(instruction("read_documents", where, "be JSON", value)) from None
    # JSON, but with numbers or a nesting beyond what Python reads
    except (ValueError, RecursionError) as error:
        requirement = "be JSON that Python can read"
        raise DataError(instruction("read_documents", where, requirement, error)) from None
    requirement = f"be an object with the key {text_field!r}"
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(instruction("read_documents", where, requirement, f"a {kind}"))
    if text_field not in record:
        shown = list(record)[:_MAX_SHOWN_KEYS]
        more = f" and {len(record) - len(shown)} more" if len(record) > len(shown) else ""
        remedy = f"{did_you_mean(text_field, shown)} Set --text-field."
        value = f"the keys {', '.join(shown) or '(none)'}{more}"
        raise DataError(instruction("read_documents", where, requirement, value, remedy))
    value = record[text_field]
    kind = type(value).__name__
    require(
        isinstance(value, str),
        "read_documents",
        where,
        f"hold text under {text_field!r}",
        f"a {kind}",
        error=DataError,
    )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        requirement = f"hold characters only under {text_field!r}"
        half = f"half of one, {value[error.start]!a}"
        message = instruction("read_documents", where, requirement, half, "Leave the line out.")
        raise DataError(message) from None
    return str(value)
