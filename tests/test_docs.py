"""What the pages say is true: Python blocks run, tables agree with the folders, names exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import piper_kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "piper_kernels"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()

# a block is left out by a comment on the line before it, which must say why
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.*?) -->\n)?^```python\n(?P<code>.*?)^```$",
    flags=re.MULTILINE | re.DOTALL,
)
MOST_BLOCKS_NOT_RUN = 3


def blocks() -> list[tuple[str, str, str | None]]:
    """(page:line, code, reason not to run) of every Python block."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            name = f"{page.relative_to(ROOT)}:{line}"
            found.append((name, match["code"], match["reason"]))
    return found


RUN = [(name, code) for name, code, reason in blocks() if reason is None]


def promised_output(code: str) -> list[str]:
    """What the comments behind ``print(...)`` promise."""
    return re.findall(r"^print\(.*\)\s+# (.*)$", code, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "code"), RUN, ids=[name for name, _ in RUN])
def test_python_blocks_run(name: str, code: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    promised = promised_output(code)
    if promised:
        assert printed.getvalue().splitlines() == promised


def test_python_blocks_are_found_and_few_are_left_out() -> None:
    assert any(name.startswith("README.md") for name, _ in RUN)
    left_out = [reason for _, _, reason in blocks() if reason is not None]
    assert all(len(reason) > 10 for reason in left_out), "say why a block is not run"
    assert len(left_out) <= MOST_BLOCKS_NOT_RUN
    # every fence that says python is one of them: none has escaped the pattern
    fences = sum(len(re.findall(r"^```\s*\{?\.?py", page.read_text(), re.M)) for page in PAGES)
    assert fences == len(blocks())


def code_block_after(text: str, heading: str) -> list[str]:
    """Lines of the first fenced block below a heading."""
    below = text.partition(f"\n{heading}\n")[2]
    return below.partition("```\n")[2].partition("```")[0].splitlines()


def table_after(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its header."""
    below = text.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    rows = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


# what tools and commands leave in the root of a checkout
LEFT_BEHIND = re.compile(r"\.(git|venv|whl|hypothesis)|site|dist|build|runs|.*_cache|.*\.egg-info")


def folders(parent: Path) -> set[str]:
    """Folders below ``parent`` that hold files of the project."""
    found = {path for path in parent.iterdir() if path.is_dir()}
    if parent == ROOT:
        found = {path for path in found if not LEFT_BEHIND.fullmatch(path.name)}
    # an empty folder is in no repository, whatever the working tree says
    return {
        path.name
        for path in found
        if any(file.is_file() and file.suffix != ".pyc" for file in path.rglob("*"))
    }


def test_readme_tree_is_the_tree() -> None:
    top, inner = set(), set()
    for line in code_block_after(README, "## The tree"):
        name, _, meaning = line.strip().partition(" ")
        assert name.endswith("/"), f"a line of the tree names a folder: {line!r}"
        assert meaning.strip(), f"{name} has no word of explanation"
        (inner if line.startswith("  ") else top).add(name.rstrip("/"))
    assert top == folders(ROOT)
    assert inner == folders(PACKAGE)


def has_kernel(path: Path) -> bool:
    """Whether a module defines a kernel, by the house's names."""
    return re.search(r"^def _\w+_kernel\(", path.read_text(), flags=re.MULTILINE) is not None


def test_readme_op_table_is_true() -> None:
    rows = table_after(README, "## Ops")
    rooms = {"oracle": None, "CPU": "cpu", "Triton": "triton"}
    listed: set[str] = set()
    for op, *columns in rows:
        for title, cell in zip(rooms, columns, strict=False):
            paths = re.findall(r"`([\w/]+\.py)`", cell)
            assert paths or cell == "-", f"README, op {op}, column {title}: {cell!r}"
            listed.update(paths)
            for path in paths:
                assert (PACKAGE / path).is_file(), f"README, op {op}, column {title}: {path}"
                room = path.rpartition("/")[0]
                # a file at the top belongs to all backends
                fits = not room or rooms[title] in (None, room)
                assert fits, f"README, op {op}: {path} under {title}"
    oracles = {f"reference/{path.name}" for path in (PACKAGE / "reference").glob("*.py")}
    kernels = {f"triton/{p.name}" for p in (PACKAGE / "triton").glob("*.py") if has_kernel(p)}
    missing = (oracles | kernels) - {"reference/__init__.py"} - listed
    assert not missing, "every oracle and every file with a kernel has its place in the table"


def test_readme_keeps_its_form() -> None:
    assert README.splitlines()[0] == "# Piper"
    assert "](http" not in README.partition("## ")[0], "no badges"


def test_contributing_is_short() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert len(lines) <= 80
    steps = [line for line in lines if re.match(r"\d\. ", line)]
    assert len(steps) == 6


def test_design_names_every_room() -> None:
    rooms = {row[0].strip("`") for row in table_after(DESIGN, "## The rooms")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert rooms == modules | folders(PACKAGE)


def test_api_lists_every_public_name() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^::: ([\w.]+)$", api, flags=re.MULTILINE))
    for name in set(piper_kernels.__all__) - {"__version__"}:
        home = getattr(piper_kernels, name).__module__
        assert f"{home}.{name}" in listed, f"docs/api.md has no entry for {home}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text()
    assert text.isascii(), "pages are plain ASCII"
    makefile = (ROOT / "Makefile").read_text()
    # `make X` in code or at the start of a line of a block, not the verb in prose
    spoken = re.findall(r"(?:`|^)make ((?:[a-z-]+ ?)+)", text, flags=re.MULTILINE)
    for target in {word for words in spoken for word in words.split()}:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for module in re.findall(r"python3? -m (bench\.\w+)", text):
        is_example = module.endswith(".NAME")
        path = ROOT / module.replace(".", "/")
        exists = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        assert is_example or exists, module
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
