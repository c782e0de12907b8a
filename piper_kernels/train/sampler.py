"""Which windows of text a step sees: a pure function of the seed and of how many were drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from piper_kernels.errors import DataError, require


class WindowSampler:
    """Windows of ``sequence_length + 1`` tokens, each text once per epoch, in a seeded order.

    Window number n is the same whenever and in whatever batches it is asked for, so the whole
    state of the data is one integer: how many windows were drawn. Windows do not overlap but for
    the one token that is a target first and an input next; each epoch starts them elsewhere.

    Args:
        segments: token ids, ``[N_i]`` int32. A window never crosses from one to another; segments
            too short for a window are left out.
        sequence_length: tokens per sequence.
        seed: of the order.

    Raises:
        DataError: if no segment holds a window.

    Example:
        >>> import numpy as np
        >>> sampler = WindowSampler([np.arange(9, dtype=np.int32)], sequence_length=8, seed=0)
        >>> sampler.windows(0, 1).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    """

    def __init__(
        self, segments: Sequence[NDArray[np.int32]], *, sequence_length: int, seed: int
    ) -> None:
        self.sequence_length = sequence_length
        self._seed = seed
        self._segments = [segment for segment in segments if len(segment) > sequence_length]
        longest = max(map(len, segments), default=0)
        require(
            bool(self._segments),
            "WindowSampler",
            "segments",
            f"hold one of more than {sequence_length} tokens",
            f"at most {longest}",
            "Give more text, or lower sequence_length.",
            error=DataError,
        )
        # one window less than fits, so that each epoch can start at another token
        fitting = [(len(segment) - 1) // sequence_length for segment in self._segments]
        self._windows_per_segment = np.array([max(1, count - 1) for count in fitting])
        self.windows_per_epoch = int(self._windows_per_segment.sum())
        self._starts: dict[int, NDArray[np.int64]] = {}

    def windows(self, first: int, count: int) -> Tensor:
        """Windows number ``first`` to ``first + count - 1``.

        Returns:
            ``[count, sequence_length + 1]`` int64.
        """
        rows = [self._window(number) for number in range(first, first + count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _window(self, number: int) -> NDArray[np.int32]:
        epoch, place = divmod(number, self.windows_per_epoch)
        segment, start = self._epoch(epoch)[place]
        return self._segments[segment][start : start + self.sequence_length + 1]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """``[windows_per_epoch, 2]`` (segment, start), shuffled; only the last epoch is kept."""
        if epoch not in self._starts:
            self._starts = {epoch: self._shuffled_starts(epoch)}
        return self._starts[epoch]

    def _shuffled_starts(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        places = []
        for index, count in enumerate(self._windows_per_segment):
            spare = len(self._segments[index]) - 1 - count * self.sequence_length
            offset = random.integers(0, min(spare, self.sequence_length - 1) + 1)
            starts = offset + self.sequence_length * np.arange(count)
            places.append(np.stack([np.full(count, index), starts], axis=1))
        return random.permutation(np.concatenate(places), axis=0)
