import errno
import json
import os
from pathlib import Path

import pytest

from piper_kernels.errors import DataError
from piper_kernels.train.data import (
    drop_repeated_paragraphs,
    read_documents,
    standard_library_topics,
)


def test_standard_library_topics_are_text_in_a_fixed_order() -> None:
    topics = standard_library_topics()
    assert topics == standard_library_topics() == read_documents([], "text")
    assert any(topic.startswith('The "assert" statement') for topic in topics)
    assert sum(map(len, topics)) > 300_000


def test_standard_library_topics_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes an import fail
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"carry pydoc_data.topics, got none. Give text files"):
        standard_library_topics()


def test_read_documents_takes_files_and_folders_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.txt").write_text("second\u00e9", encoding="utf-8")
    (folder / "inner" / "c.md").write_text("third")
    (folder / "a.rst").write_bytes(b"\xef\xbb\xbffirst")
    (folder / "empty.txt").write_text(" \n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / ".hidden" / "x.txt").write_text("unseen")
    single = tmp_path / "any.suffix"
    single.write_text("zero")
    assert read_documents([single, folder], "text") == ["zero", "first", "second\u00e9", "third"]


def test_read_documents_takes_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    # a line separator inside a string is no end of line
    texts = ["one\u2028one", "two\ntwo", ""]
    lines = [json.dumps({"body": text, "id": 1}, ensure_ascii=False) for text in texts]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert read_documents([file], "body") == ["one\u2028one", "two\ntwo"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .*a.jsonl must be JSON, got Expecting property name"),
        ("3", "line 2 of .*a.jsonl must be an object with the key 'text', got a int"),
        ('{"texts": ""}', "got the keys texts. Did you mean 'texts'. Set --text-field."),
        ("{}", "got the keys .none."),
        ('{"text": null}', "line 2 of .*a.jsonl must hold text under 'text', got a NoneType"),
        (
            '{"text": "a\\ud800"}',
            r"must hold characters only under 'text', got half of one, '.ud800'",
        ),
        ("[" * 200_000, "line 2 of .*a.jsonl must be JSON that Python can read, got maximum recur"),
        (
            '{"text": "", "id": ' + "1" * 5000 + "}",
            "must be JSON that Python can read, got Exceeds",
        ),
        (json.dumps(dict.fromkeys(map(str, range(30)))), "18, 19 and 10 more. Known: .*[0-9]. Set"),
    ],
)
def test_read_documents_names_a_bad_json_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + line)
    with pytest.raises(DataError, match=message):
        read_documents([file], "text")


def test_read_documents_names_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data must be readable, got .*none.txt .No such file"):
        read_documents([tmp_path / "none.txt"], "text")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(
        DataError, match=r"must be UTF-8 text, got .*latin.txt, where byte 3 is 0xe9"
    ):
        read_documents([latin], "text")
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\0c")
    with pytest.raises(DataError, match=r"must be text, got .*binary, which holds a NUL .* at 2"):
        read_documents([binary], "text")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"files that end in .txt, .*, got .*empty without any"):
        read_documents([empty], "text")
    with pytest.raises(DataError, match=r"data must be readable, got .*aaa \(File name too long\)"):
        read_documents([tmp_path / ("a" * 300)], "text")


def test_read_documents_names_what_it_cannot_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked.txt"
    locked.touch()

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # root may read everything, so the system is not asked
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(DataError, match=r"data must be readable, got .*locked.txt \(Permission de"):
        read_documents([tmp_path], "text")


def test_read_documents_does_not_follow_a_loop_of_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    assert read_documents([tmp_path], "text") == ["once"]


def test_drop_repeated_paragraphs_keeps_first_copies() -> None:
    documents = ["a\n\nb\nb\n\n\nc", "a", "d\r\n\r\nc\n\ne"]
    assert drop_repeated_paragraphs(documents) == ["a\n\nb\nb\n\nc", "d\n\ne"]
