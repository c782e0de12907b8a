"""Shared by all tests: the interpreter switch, seeds, hypothesis profiles, the `slow` gate."""

import os
import zlib

import hypothesis
import pytest
import torch

# Before any kernel of ours is decorated: without a GPU, kernels run in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# the same examples every time, so that a change is what turns the suite red; `make test-deep` draws
# new ones at every run
hypothesis.settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if has_gpu else 0
    runs_slow = "slow" in config.getoption("markexpr")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
        if item.get_closest_marker("multigpu") and num_gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 devices, found {num_gpus}"))
        if item.get_closest_marker("slow") and not runs_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run `make test-deep`"))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """A test's random numbers depend on its own name, not on what ran before it."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
