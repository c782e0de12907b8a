"""Decoders as data: parameters by part, total and active; equality and digests."""

from dataclasses import replace

import pytest

from piper_kernels.errors import ConfigError
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.model_description import (
    Experts,
    FeedForward,
    Layer,
    ModelDescription,
    SharedExperts,
)

ATTENTION = GroupedAttention(num_heads=2, num_kv_heads=1, head_dim=4)
NETWORK = FeedForward(intermediate_size=4)
SPARSE = Layer(
    attention=ATTENTION,
    experts=Experts(
        num_experts=4,
        top_k=2,
        network=NETWORK,
        shared=SharedExperts(network=FeedForward(intermediate_size=6), is_gated_by_token=True),
    ),
)
DENSE = Layer(attention=ATTENTION, dense=FeedForward(intermediate_size=10))
MODEL = ModelDescription(
    name="tiny", family="piper", vocab_size=10, hidden_size=8, layers=(DENSE, SPARSE)
)


def test_feed_forward_counts_biases() -> None:
    assert FeedForward(intermediate_size=4, has_bias=True).num_parameters(8) == 96 + 4 + 4 + 8
    two = FeedForward(intermediate_size=4, num_matrices=2, has_bias=True)
    assert two.num_parameters(8) == 64 + 4 + 8
    assert two.preact_size == 4


def test_layer_parameters_by_part() -> None:
    sparse = MODEL.layer_parameters(1)
    assert (sparse.attention, sparse.norms, sparse.dense) == (64 + 32 + 32 + 64, 16, 0)
    # shared: three matrices of 8 x 6 and the gate of 8
    assert (sparse.router, sparse.shared, sparse.expert) == (32, 3 * 48 + 8, 96)
    assert sparse.total - sparse.active == (4 - 2) * 96
    dense = MODEL.layer_parameters(0)
    assert (dense.dense, dense.expert, dense.total) == (240, 0, dense.active)


def test_model_description_totals() -> None:
    layers = sum(MODEL.layer_parameters(index).total for index in range(2))
    assert MODEL.num_parameters == layers + 80 + 80 + 8
    assert MODEL.num_parameters - MODEL.num_active_parameters == 2 * 96
    assert replace(MODEL, has_tied_embeddings=True).num_parameters == MODEL.num_parameters - 80
    assert replace(MODEL, has_head_bias=True).num_parameters == MODEL.num_parameters + 10
    # two norms a layer and the last one get a shift
    assert replace(MODEL, norm="layer").num_parameters == MODEL.num_parameters + 5 * 8
    assert replace(MODEL, vocab_size=0).num_parameters == layers + 8


def test_model_description_digest_is_of_what_computes() -> None:
    assert MODEL.digest() == replace(MODEL, name="other", source="elsewhere").digest()
    assert MODEL.digest() != replace(MODEL, dtype="float32").digest()
    assert MODEL.digest() != replace(MODEL, layers=(SPARSE, DENSE)).digest()
    # the same on every machine and in every process
    assert MODEL.digest() == "47458e8008f2111c59763e04cab40244"


def test_layer_has_one_kind() -> None:
    assert (DENSE.kind, SPARSE.kind) == ("dense", "moe")
    with pytest.raises(ConfigError, match="dense or experts must be given, and not both"):
        Layer(attention=ATTENTION)


def test_experts_refuse_more_chosen_than_there_are() -> None:
    with pytest.raises(ConfigError, match="top_k must be at most num_experts = 4, got 5"):
        Experts(num_experts=4, top_k=5, network=NETWORK)


def test_model_description_refuses_no_layers() -> None:
    with pytest.raises(ConfigError, match="layers must be at least one, got 0"):
        replace(MODEL, layers=())
