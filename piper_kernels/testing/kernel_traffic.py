"""What kernels load and store, counted while Triton's interpreter runs them.

The interpreter sends every load and store through two methods of its builder; while counting, both
note the addresses of the lanes that their mask lets through.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class LaunchTraffic:
    """One launch.

    Attributes:
        kernel: its name.
        issued_bytes: of all loads and stores, masked lanes apart.
        loaded: element size and addresses of each load.
        stored: likewise of each store.
    """

    kernel: str
    issued_bytes: int = 0
    loaded: list[tuple[int, NDArray[np.uint64]]] = field(default_factory=list)
    stored: list[tuple[int, NDArray[np.uint64]]] = field(default_factory=list)

    @property
    def compulsory_bytes(self) -> int:
        """Distinct bytes loaded plus distinct bytes stored."""
        return _distinct_bytes(self.loaded) + _distinct_bytes(self.stored)


def _distinct_bytes(accesses: list[tuple[int, NDArray[np.uint64]]]) -> int:
    by_size: dict[int, list[NDArray[np.uint64]]] = {}
    for size, addresses in accesses:
        by_size.setdefault(size, []).append(addresses)
    return sum(size * len(np.unique(np.concatenate(found))) for size, found in by_size.items())


@contextmanager
def count_kernel_traffic() -> Iterator[list[LaunchTraffic]]:
    """Collect a :class:`LaunchTraffic` for each kernel that is interpreted inside the block.

    Needs kernels that were imported with ``TRITON_INTERPRET=1``; compiled ones are not seen.

    Example:
        ``with count_kernel_traffic() as launches: permute_forward(x, permutation)`` leaves one
        launch, of ``_permute_kernel``.
    """
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    launches: list[LaunchTraffic] = []
    run_grid: Callable[..., Any] = GridExecutor.__call__
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def note(accesses: list[tuple[int, NDArray[np.uint64]]], ptrs: Any, mask: Any) -> None:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        addresses = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        launches[-1].issued_bytes += size * len(addresses)
        accesses.append((size, addresses))

    def counted_grid(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(LaunchTraffic(executor.fn.__name__))
        return run_grid(executor, *args, **kwargs)

    def counted_load(ptrs: Any, mask: Any, *others: Any) -> Any:
        note(launches[-1].loaded, ptrs, mask)
        return load(ptrs, mask, *others)

    def counted_store(ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        note(launches[-1].stored, ptrs, mask)
        return store(ptrs, value, mask, *others)

    with (
        patch.object(GridExecutor, "__call__", counted_grid),
        patch.object(interpreter_builder, "create_masked_load", counted_load),
        patch.object(interpreter_builder, "create_masked_store", counted_store),
    ):
        yield launches
