"""A model's layers as a few kinds, and what of them each stage has.

A search asks for the same layers thousands of times: numbers are compared where layers would have
to be hashed.

Pure: no torch, no process group.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from piper_kernels.pipeline.model_description import Layer, ModelDescription


class StageLayers(NamedTuple):
    """The layers of a stage.

    Attributes:
        first: index of the first one.
        end: index behind the last one.
        counts: how many of each kind.
        is_first: whether the embedding is here.
        is_last: whether the head is here.
    """

    first: int
    end: int
    counts: tuple[int, ...]
    is_first: bool
    is_last: bool


class LayerKinds:
    """The different layers of a model.

    Args:
        model: a decoder.
    """

    def __init__(self, model: ModelDescription) -> None:
        numbers: dict[Layer, int] = {}
        self.numbers = [numbers.setdefault(layer, len(numbers)) for layer in model.layers]
        self.kinds: tuple[Layer, ...] = tuple(numbers)
        self._before = [tuple(0 for _ in numbers)]
        for number in self.numbers:
            last = self._before[-1]
            self._before.append(tuple(n + (kind == number) for kind, n in enumerate(last)))

    def stage(self, first: int, end: int) -> StageLayers:
        """Layers ``first`` to ``end`` of the model."""
        before, behind = self._before[first], self._before[end]
        counts = tuple(b - a for a, b in zip(before, behind, strict=True))
        return StageLayers(first, end, counts, first == 0, end == len(self.numbers))

    def stages(self, layers_per_stage: Sequence[int]) -> Iterator[StageLayers]:
        """Each stage of a split."""
        first = 0
        for count in layers_per_stage:
            yield self.stage(first, first + count)
            first += count
