"""One layer: its terms by hand, and what changes when it is cut, recomputed or skewed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_kernels.pipeline.attention_description import GroupedAttention, LatentAttention
from piper_kernels.pipeline.collective_time import Group, all_reduce_s
from piper_kernels.pipeline.device_time import attention_s, gemm_time
from piper_kernels.pipeline.exchange_time import ExchangePrices, ExpertLoad
from piper_kernels.pipeline.layer_time import LayerSetting, layer_time
from piper_kernels.pipeline.model_description import Experts, FeedForward, Layer, SharedExperts
from piper_kernels.pipeline.platform_presets import load_platform

H100 = load_platform("h100")
PRICES = ExchangePrices(H100)
H = 1024
ATTENTION = GroupedAttention(num_heads=8, num_kv_heads=8, head_dim=128)
EXPERTS = Experts(num_experts=32, top_k=2, network=FeedForward(intermediate_size=512))
LAYER = Layer(attention=ATTENTION, experts=EXPERTS)
DENSE = Layer(attention=ATTENTION, dense=FeedForward(intermediate_size=2048))
SETTING = LayerSetting(microbatch_size=2, seq_len=2048)


def test_layer_time_terms_are_the_devices() -> None:
    time = layer_time(LAYER, H, SETTING, PRICES)
    device, rows = H100.device, 4096
    # queries, keys, values, output
    product = gemm_time(device, rows, 1024, 1024).seconds
    assert time.forward["attention projections"] == pytest.approx(4 * product)
    # all 32 experts are here: 256 rows each
    assert time.forward["experts gate_up"] == gemm_time(device, 256, 1024, 1024, 32).seconds
    assert time.forward["experts down"] == gemm_time(device, 256, 1024, 512, 32).seconds
    assert time.backward_weight["experts down"] == gemm_time(device, 1024, 512, 256, 32).seconds
    core = attention_s(device, num_sequences=2, seq_len=2048, num_heads=8, qk_dim=128, v_dim=128)
    assert time.forward["attention"] == core
    assert time.backward_input["attention"] == 2.5 * core
    assert time.exchange is None


def test_layer_time_backward_is_about_twice_the_forward() -> None:
    forward, inputs, weights = layer_time(LAYER, H, SETTING, PRICES).passes()
    assert 1.6 < (inputs.seconds + weights.seconds) / forward.seconds < 2.4


def test_layer_time_exchanges_over_ep() -> None:
    time = layer_time(LAYER, H, replace(SETTING, ep_size=16), PRICES)
    assert time.exchange is not None
    # two experts a rank, 4096 rows each
    assert time.forward["experts gate_up"] == gemm_time(H100.device, 4096, 1024, 1024, 2).seconds
    forward, inputs, weights = time.passes()
    assert forward.exchange_s == inputs.exchange_s == time.exchange.visible_s
    assert weights.exchange_s == 0


def test_layer_time_of_a_dense_layer_exchanges_nothing() -> None:
    time = layer_time(DENSE, H, replace(SETTING, ep_size=16), PRICES)
    assert time.exchange is None
    assert "dense network" in time.forward
    assert "router" not in time.forward


def test_layer_time_shared_experts_are_a_dense_network() -> None:
    shared = SharedExperts(network=FeedForward(intermediate_size=2048))
    layer = replace(LAYER, experts=replace(EXPERTS, shared=shared))
    time, dense = layer_time(layer, H, SETTING, PRICES), layer_time(DENSE, H, SETTING, PRICES)
    assert time.forward["shared experts"] == dense.forward["dense network"]
    assert set(time.forward) - set(layer_time(LAYER, H, SETTING, PRICES).forward) == {
        "shared experts",
        "shared experts activation",
    }


def test_layer_time_latent_attention_cuts_only_its_up_projections() -> None:
    latent = LatentAttention(
        num_heads=8,
        kv_lora_rank=256,
        q_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    layer = replace(DENSE, attention=latent)
    cut = layer_time(layer, H, replace(SETTING, tp_size=4), PRICES)
    down = sum(gemm_time(H100.device, 4096, n, 1024).seconds for n in (512, 320))
    up = [(8 * 192 // 4, 512), (8 * 256 // 4, 256), (1024, 8 * 128 // 4)]
    products = sum(gemm_time(H100.device, 4096, n, k).seconds for n, k in up)
    assert cut.forward["attention projections"] == pytest.approx(down + products)


def test_layer_time_full_checkpointing_repeats_the_forward() -> None:
    setting = replace(SETTING, ep_size=16, checkpointing="full")
    plain, again = (
        layer_time(LAYER, H, s, PRICES) for s in (replace(SETTING, ep_size=16), setting)
    )
    assert sum(again.recompute.values()) == pytest.approx(sum(plain.forward.values()))
    _, inputs, _ = again.passes()
    assert inputs.exchange_s == 2 * plain.exchange_s


@pytest.mark.parametrize("is_fused", [True, False])
def test_layer_time_selective_checkpointing_repeats_the_core(is_fused: bool) -> None:
    setting = replace(SETTING, is_attention_fused=is_fused, checkpointing="selective")
    time = layer_time(DENSE, H, setting, PRICES)
    assert time.recompute == {"attention again": time.forward["attention"]}


def test_layer_time_saving_x_computes_the_first_product_again() -> None:
    time = layer_time(LAYER, H, replace(SETTING, experts_save="x"), PRICES)
    assert time.backward_input["experts gate_up again"] == time.forward["experts gate_up"]


def test_layer_time_tensor_parallelism_cuts_products_and_adds_sums() -> None:
    time = layer_time(DENSE, H, replace(SETTING, tp_size=4), PRICES)
    group = Group(size=4, stride=1, world_size=4)
    summed = 2 * all_reduce_s(H100, group, 2.0 * 4096 * 1024)
    assert time.forward["tensor parallel"] == summed
    # the backward also gathers the inputs again, of which each rank kept a part
    assert time.backward_input["tensor parallel"] == pytest.approx(1.5 * summed)
    whole = layer_time(DENSE, H, SETTING, PRICES)
    for name in (
        "attention projections",
        "dense network",
        "norms and residuals",
        "dense network activation",
    ):
        assert time.forward[name] < whole.forward[name]
    apart = layer_time(DENSE, H, replace(SETTING, tp_size=4, is_sequence_parallel=False), PRICES)
    assert apart.backward_input["tensor parallel"] == summed
    assert apart.forward["norms and residuals"] == whole.forward["norms and residuals"]


def test_layer_time_the_busiest_rank_decides() -> None:
    skewed = ExchangePrices(H100, load=ExpertLoad.from_counts([1.0] * 30 + [17.0, 17.0]))
    setting = replace(SETTING, ep_size=16)
    hot, even = (layer_time(LAYER, H, setting, prices) for prices in (skewed, PRICES))
    ratio = hot.forward["experts gate_up"] / even.forward["experts gate_up"]
    # 34 of 64 rows on one of 16 ranks: 8.5 times the mean
    assert ratio == pytest.approx(8.5, rel=0.15)
    assert hot.exchange_s > even.exchange_s


@given(
    top_k=st.integers(1, 8),
    size=st.sampled_from([128, 256, 384, 1024]),
    sequences=st.integers(1, 4),
    seq_len=st.sampled_from([512, 1024, 4096]),
)
def test_layer_time_grows_with_work(top_k: int, size: int, sequences: int, seq_len: int) -> None:
    # field report A89: K and the experts' width must be read
    setting = replace(SETTING, microbatch_size=sequences, seq_len=seq_len)

    def seconds(top_k: int = top_k, size: int = size, **changes: object) -> float:
        network = FeedForward(intermediate_size=size)
        layer = replace(LAYER, experts=replace(EXPERTS, top_k=top_k, network=network))
        time = layer_time(layer, H, replace(setting, **changes), PRICES)
        return sum(p.seconds for p in time.passes())

    base = seconds()
    assert base > 0
    assert seconds(top_k=top_k * 2) > base
    assert seconds(size=size * 2) > base
    assert seconds(microbatch_size=sequences + 1) > base
    assert seconds(seq_len=seq_len * 2) > base
    assert seconds(checkpointing="full") > base
