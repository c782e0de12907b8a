"""The tuning cache: one JSON file a device, with the tiles that won there.

A file belongs to a device name, a compute capability and a Triton version; all three are in its
name and in it. Writers take a lock, read what is there, add to it and replace the file at once, so
several processes lose nothing of one another and nobody reads half a file.
"""

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from piper_kernels.errors import ConfigError
from piper_kernels.strict_model import PositiveFloat, StrictModel, digest_of
from piper_kernels.triton.tiles import TileConfig

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "PIPER_CACHE_DIR"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceIdentity:
    """What a measurement is true for.

    Attributes:
        name: of the device, e.g. ``"NVIDIA H200"``.
        capability: e.g. ``"9.0"``, or AMD's architecture.
        triton: version of Triton.
    """

    name: str
    capability: str
    triton: str


class TileRecord(StrictModel):
    """A :class:`TileConfig` in a file; ``split_rows`` follows from the sizes and is not kept."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    num_xcds: int

    @classmethod
    def of(cls, tiles: TileConfig) -> "TileRecord":
        """The record of some tiles."""
        return cls(**{name: value for name, value in asdict(tiles).items() if name != "split_rows"})

    def tiles(self) -> TileConfig:
        """The tiles of the record.

        Raises:
            ConfigError: they cannot run.
        """
        return TileConfig(**self.model_dump())


class Winner(StrictModel):
    """The fastest tiles of one GEMM, and both sides of the comparison, measured in one run."""

    tiles: TileRecord
    winner_us: PositiveFloat
    default_us: PositiveFloat


class TileFile(StrictModel):
    """What a cache file holds; keys of ``winners`` are :meth:`LayerKey.text`."""

    version: Literal[1]
    device: str
    capability: str
    triton: str
    winners: dict[str, Winner]


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where cache files lie: ``PIPER_CACHE_DIR``, else ``piper`` in the XDG cache folder.

    Example:
        >>> cache_folder({"XDG_CACHE_HOME": "/tmp/cache", "HOME": "/home/ann"}).as_posix()
        '/tmp/cache/piper'
        >>> cache_folder({"HOME": "/home/ann"}).as_posix()
        '/home/ann/.cache/piper'
    """
    if environment.get(FOLDER_VARIABLE):
        return Path(environment[FOLDER_VARIABLE])
    home = Path(environment.get("HOME") or tempfile.gettempdir())
    base = environment.get("XDG_CACHE_HOME") or ""
    # the XDG base directory specification: relative paths are invalid and to be ignored
    return (Path(base) if Path(base).is_absolute() else home / ".cache") / "piper"


class TileCache:
    """The cache file of one device.

    Args:
        folder: where it lies.
        identity: what it belongs to.
    """

    def __init__(self, folder: Path, identity: DeviceIdentity) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", identity.name.lower()).strip("-")
        digest = digest_of(identity.name, identity.capability, identity.triton)[:8]
        self.path = folder / f"tiles-{slug}-{digest}.json"
        self._identity = identity
        self._has_warned = False

    def read(self) -> dict[str, Winner]:
        """The winners on disk; none if there is no file, or none of ours (one warning)."""
        if not self.path.exists():
            return {}
        try:
            file = TileFile.load(self.path)
            for winner in file.winners.values():
                winner.tiles.tiles()
        except ConfigError as error:
            self._warn(str(error).splitlines()[0])
            return {}
        found = DeviceIdentity(name=file.device, capability=file.capability, triton=file.triton)
        if found != self._identity:
            self._warn(f"it belongs to {found}, not to {self._identity}")
            return {}
        return dict(file.winners)

    def add(self, winners: Mapping[str, Winner]) -> None:
        """Add winners to the file, replacing those of equal keys.

        A folder that cannot be written is reported once and costs nothing but the memory.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._replace({**self.read(), **winners})
        except OSError as error:
            self._warn(f"it cannot be written: {error}")

    def _replace(self, winners: dict[str, Winner]) -> None:
        identity = self._identity
        file = TileFile(
            version=1,
            device=identity.name,
            capability=identity.capability,
            triton=identity.triton,
            winners=dict(sorted(winners.items())),
        )
        # a name of its own, so that a writer that dies leaves the old file whole
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(file.to_json() + "\n")
        os.replace(name, self.path)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("tuning cache %s is ignored: %s", self.path, reason)
