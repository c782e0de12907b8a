"""What real models hold is counted once for each storage, and the same real and fake."""

from typing import cast

import pytest
import torch
from torch import nn

from bench.memory_runs import (
    attention_kernel,
    build,
    measured_saved_bytes,
    measured_static_bytes,
    saved_bytes,
    small_config,
)


class _Squares(nn.Module):
    """Keeps its input twice, once as a view: one storage."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> torch.Tensor:
        x = torch.ones(6, requires_grad=True) + 1.0
        return (x * x + x.view(2, 3).flatten() ** 2).sum()


def test_saved_bytes_counts_a_storage_once() -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    assert saved_bytes(_Squares(), ids) == 6 * 4


def test_measured_saved_bytes_is_the_same_on_fake_tensors() -> None:
    real = measured_saved_bytes(small_config("olmoe"), "flash", batch=2, seq_len=16)
    fake = measured_saved_bytes(small_config("olmoe"), "flash", batch=2, seq_len=16, is_fake=True)
    assert fake == pytest.approx(real, rel=1e-3)


def test_measured_static_bytes_is_16_a_parameter() -> None:
    config = small_config("mixtral")
    num_parameters = sum(one.numel() for one in build(config, "eager").parameters())
    # a step counter of four bytes for each tensor comes on top
    assert 0 < measured_static_bytes(config) - 16 * num_parameters < 1000
    assert measured_static_bytes(config, momentum=0.9) == 12 * num_parameters


def test_attention_kernel_of_a_cpu() -> None:
    kernels = [attention_kernel(one, "flash") for one in ("mixtral", "gpt_oss", "deepseek_v3")]
    assert kernels == ["flash", "eager", "math"]
    assert attention_kernel("deepseek_v3", "eager") == "eager"


def test_build_selects_pipers_experts() -> None:
    model = build(small_config("mixtral"), "flash")
    config = cast(nn.Module, model).config
    assert config._experts_implementation == "piper"
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
