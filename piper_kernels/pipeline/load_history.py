"""What each expert had to do lately, and what it will have to do: averages, trend, imbalance.

Layers are named by their number in the model, dense layers counted, on every pipeline stage;
experts by their logical ids, wherever they live.

Pure: no torch, no process group. Letters: L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from piper_kernels.dist.links import FloatArray
from piper_kernels.errors import require


class LoadHistory:
    """Moving averages of the rows of each expert in each layer, with their trend (Holt's method).

    Args:
        layers: numbers of the MoE layers, rising.
        num_experts: E.
        memory_steps: how many steps an average looks back on; 1 keeps the last step alone.

    Raises:
        ConfigError: no layers, layers not rising, no experts, or a memory below one step.

    Example:
        >>> history = LoadHistory([1, 3], num_experts=2, memory_steps=1)
        >>> history.add({1: [6, 2], 3: [4, 4]})
        >>> history.loads(1).tolist(), history.loads(3).tolist()
        ([6.0, 2.0], [4.0, 4.0])
    """

    def __init__(self, layers: Sequence[int], num_experts: int, memory_steps: float = 50) -> None:
        name = "LoadHistory"
        fits = bool(layers) and list(layers) == sorted({*layers}) and layers[0] >= 0
        require(fits, name, "layers", "be rising numbers of layers", list(layers))
        require(num_experts >= 1, name, "num_experts", "be at least 1", num_experts)
        require(memory_steps >= 1, name, "memory_steps", "be at least 1", memory_steps)
        self.layers = tuple(layers)
        self.num_experts = num_experts
        self.memory_steps = memory_steps
        self.num_steps = 0
        self._level = np.zeros((len(layers), num_experts))
        self._trend = np.zeros_like(self._level)

    def add(self, counts: Mapping[int, ArrayLike]) -> None:
        """Take in one step.

        Args:
            counts: layer -> ``[E]`` rows of each logical expert, over all ranks, padding excluded.

        Raises:
            ConfigError: other layers, another number of experts, or a negative count.

        Example:
            >>> history = LoadHistory([0], num_experts=2)
            >>> history.add({2: [1, 1]})
            Traceback (most recent call last):
            ...
            piper_kernels.errors.ConfigError: LoadHistory.add: counts must be of the layers (0,), \
got (2,). Name layers by their number in the model, dense ones counted.
        """
        name, given = "LoadHistory.add", tuple(sorted(counts))
        remedy = "Name layers by their number in the model, dense ones counted."
        requirement = f"be of the layers {self.layers}"
        require(given == self.layers, name, "counts", requirement, given, remedy)
        rows = []
        for layer in self.layers:
            row = np.asarray(counts[layer], dtype=np.float64)
            fits = row.shape == (self.num_experts,)
            requirement = f"hold E = {self.num_experts} counts"
            require(fits, name, f"counts[{layer}]", requirement, f"shape {row.shape}")
            is_count = bool(np.isfinite(row).all() and (row >= 0).all())
            require(is_count, name, f"counts[{layer}]", "be finite and >= 0", row.tolist())
            rows.append(row)
        now = np.stack(rows)
        if self.num_steps == 0:
            self._level = now
        else:
            weight = 2 / (self.memory_steps + 1)
            # the trend follows more slowly than the level, or it would chase noise
            before, slow = self._level, weight / 2
            self._level = weight * now + (1 - weight) * (before + self._trend)
            self._trend = slow * (self._level - before) + (1 - slow) * self._trend
        self.num_steps += 1

    def loads(self, layer: int, steps_ahead: float = 0) -> FloatArray:
        """``[E]`` rows per step now, or forecast; never negative.

        Args:
            layer: its number in the model.
            steps_ahead: how far to follow the trend.

        Raises:
            ConfigError: the layer is none of the history's.
        """
        fits = layer in self.layers
        require(fits, "LoadHistory.loads", "layer", f"be one of {self.layers}", layer)
        row = self.layers.index(layer)
        return np.maximum(self._level[row] + steps_ahead * self._trend[row], 0.0)

    def to_state(self) -> dict[str, Any]:
        """Everything as JSON values, for a checkpoint."""
        return {
            "layers": list(self.layers),
            "num_experts": self.num_experts,
            "memory_steps": self.memory_steps,
            "num_steps": self.num_steps,
            "level": self._level.tolist(),
            "trend": self._trend.tolist(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The history that ``to_state`` wrote.

        Example:
            >>> history = LoadHistory([0], num_experts=1)
            >>> history.add({0: [3]})
            >>> LoadHistory.from_state(history.to_state()).loads(0).tolist()
            [3.0]
        """
        history = cls(state["layers"], state["num_experts"], state["memory_steps"])
        history.num_steps = state["num_steps"]
        history._level = np.array(state["level"])
        history._trend = np.array(state["trend"])
        return history
