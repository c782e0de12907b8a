"""Three kinds of bytes of a launch, and the memory that turns the second kind into the third.

*Issued*: every load and store of every program, masked lanes apart. *Compulsory*: distinct
addresses read plus distinct addresses written; no implementation of the launch moves less.
*Modelled DRAM*: compulsory plus what is read again after the last-level cache has lost it.

The cache is modelled as least recently used, at the granularity of waves: as many consecutive
programs as fit the machine run in step, so a wave reads each of its rows and weight panels once;
data of an earlier wave is still there if no more bytes than the cache holds were touched since.
Stores take room in the cache too. Drift between programs and the cache's own replacement policy
are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper_kernels.cost.ragged import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the model knows of a machine's memory.

    Attributes:
        cache_bytes: size of the last-level cache; infinite means that nothing is read twice.
        num_programs: programs that run at once.
    """

    cache_bytes: float = math.inf
    num_programs: int = 1


NOTHING_LOST = Memory()


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one launch computes and moves.

    Example:
        >>> total = Traffic(flops=8, issued=9, compulsory=5, reread=1) + Traffic(issued=1)
        >>> total.issued, total.compulsory, total.dram
        (10, 5, 6)
    """

    flops: int = 0
    issued: int = 0
    compulsory: int = 0
    reread: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            flops=self.flops + other.flops,
            issued=self.issued + other.issued,
            compulsory=self.compulsory + other.compulsory,
            reread=self.reread + other.reread,
        )

    @property
    def dram(self) -> int:
        """Modelled DRAM bytes."""
        return self.compulsory + self.reread

    def bound_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds below which a machine with these rates cannot go, by this model.

        Example:
            >>> Traffic(flops=100, compulsory=10).bound_s(50.0, 1.0)
            10.0
        """
        return max(self.flops / flops_per_s, self.dram / bytes_per_s)


def plain(issued: int, compulsory: int | None = None, *, flops: int = 0) -> Traffic:
    """A launch that reads nothing again; its loads and stores are distinct unless said."""
    return Traffic(
        flops=flops, issued=issued, compulsory=issued if compulsory is None else compulsory
    )


class CacheModel:
    """Least recently used, wave by wave; counts the bytes that have to be read again.

    Example:
        >>> cache = CacheModel(cache_bytes=8, num_keys={"rows": 3})
        >>> for keys in ([0, 1], [0], [2], [1]):
        ...     cache.touch("rows", np.array(keys), 4)
        ...     cache.end_wave()
        >>> cache.reread_bytes  # row 1 was lost: 0 and 2 were touched since
        4
    """

    def __init__(self, *, cache_bytes: float, num_keys: dict[str, int]) -> None:
        self.reread_bytes = 0
        self._cache_bytes = cache_bytes
        self._last = {name: np.full(num, -1, dtype=np.int64) for name, num in num_keys.items()}
        # bytes whose last touch was in wave w, and everything touched from wave w on
        self._bytes_of_wave = np.zeros(1)
        self._since_wave = np.zeros(1)

    @property
    def _wave(self) -> int:
        return len(self._bytes_of_wave) - 1

    def touch(self, operand: str, keys: IntArray, bytes_each: float) -> None:
        """Read ``bytes_each`` at each of some different keys of an operand."""
        last = self._last[operand][keys]
        is_seen = (last >= 0) & (last < self._wave)
        seen = last[is_seen]
        num_lost = int((self._since_wave[seen] > self._cache_bytes).sum())
        self.reread_bytes += round(num_lost * bytes_each)
        self._bytes_of_wave -= np.bincount(seen, minlength=self._wave + 1) * bytes_each
        # what this wave touched before costs nothing
        self._bytes_of_wave[-1] += int((last < self._wave).sum()) * bytes_each
        self._last[operand][keys] = self._wave

    def write(self, num_bytes: float) -> None:
        """Write bytes that nobody reads in this launch."""
        self._bytes_of_wave[-1] += num_bytes

    def end_wave(self) -> None:
        """Whatever comes now runs after what came so far."""
        self._bytes_of_wave = np.append(self._bytes_of_wave, 0.0)
        self._since_wave = np.cumsum(self._bytes_of_wave[::-1])[::-1]


def waves(num_programs: int, per_wave: int) -> Iterator[slice]:
    """Consecutive programs that run at once.

    Example:
        >>> [(wave.start, wave.stop) for wave in waves(5, 2)]
        [(0, 2), (2, 4), (4, 6)]
    """
    for start in range(0, num_programs, per_wave):
        yield slice(start, start + per_wave)
