"""What a config gives, and errors that name file, key and value."""

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.config_reader import ConfigReader


def reader(**config: object) -> ConfigReader:
    return ConfigReader(config, "config.json")


def test_config_reader_size_takes_the_first_name_given() -> None:
    assert reader(b=3, a=None).size("a", "b") == 3
    assert reader(a=2, b=3).size("a", "b") == 2
    assert reader().size("a", default=7) == 7
    assert reader(a=0).size("a", least=0) == 0


@pytest.mark.parametrize("value", [0, -3, 2.0, float("nan"), True, "8", [8]])
def test_config_reader_size_refuses(value: object) -> None:
    message = r"config.json: hidden_size must be an integer >= 1, got"
    with pytest.raises(ConfigError, match=message):
        reader(hidden_size=value).size("hidden_size")


def test_config_reader_flags_and_lists() -> None:
    assert reader(bias=True).flag("bias", default=False)
    assert reader(bias=None).flag("bias", default=True)
    assert reader(layers=[1, 2]).sizes("layers") == (1, 2)
    assert reader(layers=None).sizes("layers") == ()
    with pytest.raises(ConfigError, match="bias must be true or false, got 1"):
        reader(bias=1).flag("bias", default=False)
    with pytest.raises(ConfigError, match=r"layers must be a list of integers, got \[0.5\]"):
        reader(layers=[0.5]).sizes("layers")


def test_config_reader_dtype_under_both_names() -> None:
    assert reader(torch_dtype="torch.float16").dtype() == "float16"
    assert reader(dtype="float32", torch_dtype="float16").dtype() == "float32"
    assert reader().dtype() == "bfloat16"
    with pytest.raises(ConfigError, match="dtype must be one of bfloat16, float16, float32, got"):
        reader(dtype="float8_e4m3fn").dtype()
