"""Named shapes: sizes, sources, and what scaling says about itself."""

import pytest

from bench.moe_problem import FAMILIES
from bench.shapes import MODELS, SHAPES, find_shape
from piper_kernels.errors import ConfigError

# parameters of the routed experts of one layer, from the models' published totals' arithmetic
EXPERT_PARAMETERS = {
    "mixtral_8x7b": 1_409_286_144,
    "olmoe_1b_7b": 402_653_184,
    "qwen3_30b_a3b": 603_979_776,
    "deepseek_v3": 11_274_289_152,
    "granite_moe_3b": 94_371_840,
}


@pytest.mark.parametrize("name", EXPERT_PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert SHAPES[name].num_parameters == EXPERT_PARAMETERS[name]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_shapes_state_source_and_family(shape) -> None:
    assert "/" in shape.source
    assert "config.json" in shape.source
    assert shape.family in FAMILIES
    assert 1 <= shape.K <= shape.E
    assert shape.shared_I % shape.I == 0 or shape.family == "qwen2_moe"
    assert SHAPES[shape.name] is shape


def test_scaled_shapes_say_what_was_taken() -> None:
    few = SHAPES["deepseek_v3_e32"]
    assert (few.H, few.I, few.E, few.K) == (7168, 2048, 32, 8)
    assert few.source.endswith("32 of its 256 experts")
    narrow = SHAPES["mixtral_8x7b_i3584"]
    assert (narrow.I, narrow.E) == (3584, 8)
    assert narrow.source.endswith("3584 of its 14336 intermediate channels")


def test_scaling_refuses_what_no_longer_is_the_model() -> None:
    olmoe = SHAPES["olmoe_1b_7b"]
    with pytest.raises(ConfigError, match=r"num_experts must be in \[K, E\], got 4"):
        olmoe.with_experts(4)
    with pytest.raises(ConfigError, match=r"intermediate_size must divide I = 1024, got 1000"):
        olmoe.with_intermediate(1000)


def test_find_shape_suggests_the_nearest() -> None:
    assert find_shape("olmoe_1b_7b") in MODELS
    with pytest.raises(ConfigError, match=r"got 'olmoe'\. .*olmoe_1b_7b"):
        find_shape("olmoe")
