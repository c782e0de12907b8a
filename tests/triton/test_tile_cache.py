"""The cache file: strict, atomic, shared by processes; what is not ours is ignored and replaced."""

import json
import logging
import multiprocessing
from pathlib import Path

import pytest

from piper_kernels.triton.tile_cache import (
    DeviceIdentity,
    TileCache,
    TileRecord,
    Winner,
    cache_folder,
)
from piper_kernels.triton.tiles import TileConfig

IDENTITY = DeviceIdentity(name="NVIDIA H200", capability="9.0", triton="3.9.0")
TILES = TileConfig(block_m=64, block_n=128, block_k=32, num_warps=8, group_m=4)


def winner(winner_us: float = 2.0) -> Winner:
    return Winner(tiles=TileRecord.of(TILES), winner_us=winner_us, default_us=3.0)


def test_tile_record_keeps_tiles() -> None:
    assert TileRecord.of(TILES).tiles() == TILES


def test_cache_survives_a_new_process(tmp_path: Path) -> None:
    TileCache(tmp_path / "new", IDENTITY).add({"a": winner()})
    TileCache(tmp_path / "new", IDENTITY).add({"b": winner(1.0)})
    again = TileCache(tmp_path / "new", IDENTITY)
    assert again.read() == {"a": winner(), "b": winner(1.0)}
    assert again.path.name.startswith("tiles-nvidia-h200-")
    assert not list(again.path.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    "change", [{"name": "NVIDIA H100"}, {"capability": "9.1"}, {"triton": "3.8.0"}], ids=str
)
def test_cache_of_another_device_is_another_file(tmp_path: Path, change: dict[str, str]) -> None:
    ours = TileCache(tmp_path, IDENTITY)
    values = {"name": "NVIDIA H200", "capability": "9.0", "triton": "3.9.0"}
    other = TileCache(tmp_path, DeviceIdentity(**values | change))
    ours.add({"a": winner()})
    assert other.path != ours.path
    assert other.read() == {}


def corrupt(text: str, how: str) -> str:
    content = json.loads(text)
    if how == "cut":
        return text[: len(text) // 2]
    if how == "foreign":
        content["device"] = "NVIDIA A100"
    elif how == "unknown_key":
        content["color"] = "red"
    elif how == "other_version":
        content["version"] = 2
    elif how == "impossible_tiles":
        content["winners"]["a"]["tiles"]["block_m"] = 48
    else:
        content["winners"]["a"]["winner_us"] = -1.0
    return json.dumps(content)


@pytest.mark.parametrize(
    "how", ["cut", "foreign", "unknown_key", "other_version", "impossible_tiles", "negative_time"]
)
def test_cache_that_is_not_ours_is_ignored_once_and_rewritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    cache = TileCache(tmp_path, IDENTITY)
    cache.add({"a": winner()})
    cache.path.write_text(corrupt(cache.path.read_text(), how))
    with caplog.at_level(logging.WARNING):
        assert cache.read() == {}
        assert cache.read() == {}
        cache.add({"b": winner()})
    assert len(caplog.records) == 1
    assert f"tuning cache {cache.path} is ignored" in caplog.text
    assert TileCache(tmp_path, IDENTITY).read() == {"b": winner()}


def test_cache_in_a_folder_that_cannot_be_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = TileCache(tmp_path / "file", IDENTITY)
    with caplog.at_level(logging.WARNING):
        cache.add({"a": winner()})
        cache.add({"a": winner()})
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def write(folder: str, first: int) -> None:
    cache = TileCache(Path(folder), IDENTITY)
    for number in range(first, first + 10):
        cache.add({f"key {number}": winner(number + 1.0)})


def test_cache_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    # spawned, because a test process has threads
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write, args=(str(tmp_path), 10 * i)) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = TileCache(tmp_path, IDENTITY).read()
    assert found == {f"key {number}": winner(number + 1.0) for number in range(20)}


def test_cache_folder_follows_the_variables() -> None:
    home = {"HOME": "/home/ann"}
    assert cache_folder(home) == Path("/home/ann/.cache/piper")
    assert cache_folder(home | {"XDG_CACHE_HOME": "/x"}) == Path("/x/piper")
    # the specification: relative paths are ignored
    assert cache_folder(home | {"XDG_CACHE_HOME": "x"}) == Path("/home/ann/.cache/piper")
    assert cache_folder(home | {"XDG_CACHE_HOME": "/x", "PIPER_CACHE_DIR": "/y"}) == Path("/y")
