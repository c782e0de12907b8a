from pathlib import Path

import pytest

from piper_kernels.errors import CheckpointError
from piper_kernels.train.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    describe_files,
    read_manifest,
)


def test_manifest_round_trips(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    files = describe_files(tmp_path)
    # printf abc | sha256sum
    assert files["a.bin"].num_bytes == 3
    assert files["a.bin"].sha256.startswith("ba7816bf8f01cfea414140de5dae2223b00361a396177a9c")
    manifest = Manifest(
        step=3,
        settings={"data": ["x"], "prompt": None},
        text_sha256="t",
        model_digest="m",
        versions={"torch": "2"},
        files=files,
    )
    check_files(tmp_path, manifest, "")
    (tmp_path / MANIFEST).write_text(manifest.model_dump_json())
    check_files(tmp_path, manifest, "")
    checkpoint = tmp_path.rename(tmp_path.with_name("step-00000003"))
    assert read_manifest(checkpoint, "") == manifest
    message = r"got .*step-00000004, whose checkpoint.json is of step 3. Do this."
    with pytest.raises(CheckpointError, match=message):
        read_manifest(checkpoint.rename(tmp_path.with_name("step-00000004")), "Do this.")


def test_read_manifest_refuses_another_version(tmp_path: Path) -> None:
    text = Manifest(
        step=1, settings={}, text_sha256="", model_digest="", versions={}, files={}
    ).model_dump_json()
    (tmp_path / MANIFEST).write_text(text.replace('"version":1', '"version":2'))
    with pytest.raises(CheckpointError, match=r"version must be 1, got 2\.\). Do this\."):
        read_manifest(tmp_path, "Do this.")
