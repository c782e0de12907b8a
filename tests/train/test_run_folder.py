import errno
from pathlib import Path

import pytest

from piper_kernels.errors import CheckpointError
from piper_kernels.train.run_folder import RunFolder, explained_writing


def open_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
    return RunFolder(path, is_resumed=resume, may_overwrite=overwrite)


def make_run(path: Path) -> None:
    folder = open_folder(path)
    folder.start("steps = 1\n")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.metrics.write_text("{}\n")
    folder.close()


def test_run_folder_is_made_and_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    open_folder(path).close()
    # a start that failed before the run began leaves nothing in the way
    folder = open_folder(path)
    folder.start("steps = 1\n")
    lines = (path / "settings.toml").read_text().splitlines()
    assert lines == ["# settings of a run of piper train, which owns this folder", "steps = 1"]
    folder.close()


def test_run_folder_refuses_to_clobber_a_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    message = (
        r"RunFolder: out must be an empty or a new folder, got .*, which holds a run. "
        r"Go on with --resume, delete that run with --overwrite, or choose another."
    )
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)
    assert (tmp_path / "checkpoints" / "step-00000001").exists()


def test_run_folder_overwrites_only_what_a_run_wrote_and_only_at_its_start(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    folder = open_folder(tmp_path, overwrite=True)
    assert folder.metrics.exists()
    folder.start("steps = 2\n")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [".lock", "notes.txt", "settings.toml"]
    folder.close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_run_folder_refuses_a_folder_of_something_else(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "model").mkdir()
    message = r"got .*, which holds something else. Choose another folder."
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path, overwrite=overwrite)
    assert (tmp_path / "model").exists()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match=r"out must be a folder, got the file .*file\."):
        open_folder(file, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_run_folder_is_not_fooled_by_files_of_the_same_names(
    tmp_path: Path, overwrite: bool
) -> None:
    # many programs keep a settings.toml
    (tmp_path / "settings.toml").write_text("[default]\nport = 80\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.bin").touch()
    with pytest.raises(
        CheckpointError, match=r"got .*, which holds something else. Choose another"
    ):
        open_folder(tmp_path, overwrite=overwrite)
    assert (tmp_path / "model" / "precious.bin").exists()
    with pytest.raises(CheckpointError, match=r"out must hold a run, got"):
        open_folder(tmp_path, resume=True)


def test_run_folder_overwrites_through_a_link(tmp_path: Path) -> None:
    path, big = tmp_path / "run", tmp_path / "big"
    make_run(path)
    (path / "checkpoints").rename(big)
    (big / "note").touch()
    (path / "checkpoints").symlink_to(big)
    folder = open_folder(path, overwrite=True)
    folder.start("")
    folder.close()
    assert (path / "checkpoints").is_symlink()
    assert list(big.iterdir()) == []


def test_explained_writing_says_what_the_system_said(tmp_path: Path) -> None:
    message = r"RunFolder: out must be writable, got .*\(No space left\). Free the disk or choose"
    with pytest.raises(CheckpointError, match=message), explained_writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left")


def test_run_folder_resumes_only_a_run(tmp_path: Path) -> None:
    message = r"out must hold a run, got .*none. Name the run's folder with --out"
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path / "none", resume=True)
    make_run(tmp_path)
    open_folder(tmp_path, resume=True).close()


def test_run_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = open_folder(tmp_path)
    message = r"out must be free, got .*, where another process is training. Wait for it"
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)
    first.close()
    open_folder(tmp_path).close()
