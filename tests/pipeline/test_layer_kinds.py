"""Kinds of layers: each layer once, in order, counted by kind."""

from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.layer_kinds import LayerKinds
from piper_kernels.pipeline.model_description import FeedForward, Layer, ModelDescription

ATTENTION = GroupedAttention(num_heads=1, num_kv_heads=1, head_dim=8)
A, B = (Layer(attention=ATTENTION, dense=FeedForward(intermediate_size=n)) for n in (8, 16))
MODEL = ModelDescription(
    name="m", family="piper", vocab_size=8, hidden_size=8, layers=(A, B, B, A, B)
)


def test_layer_kinds_number_the_different_layers() -> None:
    kinds = LayerKinds(MODEL)
    assert kinds.kinds == (A, B)
    assert kinds.numbers == [0, 1, 1, 0, 1]


def test_stages_cover_each_layer_once() -> None:
    first, second = LayerKinds(MODEL).stages((2, 3))
    assert (first.first, first.end, first.counts) == (0, 2, (1, 1))
    assert (second.first, second.end, second.counts) == (2, 5, (1, 2))
    assert (first.is_first, first.is_last, second.is_first, second.is_last) == (1, 0, 0, 1)
