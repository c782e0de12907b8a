"""Exchanges: rows under even and skewed loads, prices from the traffic model, prices kept."""

import numpy as np
import pytest

from piper_kernels.dist.exchange_counts import expect_rows
from piper_kernels.dist.placement_map import PlacementMap
from piper_kernels.dist.traffic import predict
from piper_kernels.dist.traffic_tasks import Traffic
from piper_kernels.errors import ConfigError, PlanError
from piper_kernels.pipeline.exchange_time import ExchangePrices, ExpertLoad
from piper_kernels.pipeline.model_description import Experts, FeedForward
from piper_kernels.pipeline.platform_presets import load_platform

FRONTIER = load_platform("frontier")
EXPERTS = Experts(num_experts=32, top_k=2, network=FeedForward(intermediate_size=512))


def price(prices: ExchangePrices, **changes: float):
    fields = {"hidden_size": 1024, "ep_size": 16, "tp_size": 1, "num_tokens": 4096, "expert_s": 0.0}
    return prices.price(EXPERTS, **{**fields, **changes})


def test_price_is_the_traffic_models() -> None:
    flat = ExchangePrices(FRONTIER, algorithms=("flat",), chunk_options=(1,))
    topology = FRONTIER.lay_out(16)
    counts = expect_rows(topology, PlacementMap.contiguous(32, 16), 4096, 2)
    traffic = Traffic(
        topology=topology, counts=counts, dispatch_row_bytes=2048, combine_row_bytes=2048, top_k=2
    )
    assert price(flat).visible_s == predict(traffic, "flat").seconds
    best = price(ExchangePrices(FRONTIER))
    assert best.visible_s <= price(flat).visible_s
    assert best.prediction.algorithm in best.reason


def test_price_hides_behind_experts_but_not_all() -> None:
    prices = ExchangePrices(FRONTIER)
    alone, beside = price(prices).visible_s, price(prices, expert_s=5e-3).visible_s
    assert 0 < beside < alone


def test_price_is_asked_once() -> None:
    prices = ExchangePrices(FRONTIER)
    assert price(prices) is price(prices)
    assert price(prices, expert_s=1.23456e-3) is price(prices, expert_s=1.23459e-3)


def test_price_grows_with_tokens_and_nodes() -> None:
    prices = ExchangePrices(FRONTIER)
    assert price(prices, num_tokens=8192).visible_s > price(prices).visible_s
    assert price(prices, ep_size=32).visible_s > price(prices, ep_size=8).visible_s
    with pytest.raises(PlanError, match="ep_size must be at most the 32 experts, got 64"):
        price(prices, ep_size=64)


def test_price_under_tensor_parallelism_sends_each_row_once() -> None:
    # two ranks share each token: sliced, both exchange half the rows
    best = price(ExchangePrices(FRONTIER), tp_size=2)
    assert best.prediction.tp_mode == "sliced"


def test_imbalance_of_given_loads() -> None:
    shares = [1.0] * 31 + [33.0]
    prices = ExchangePrices(FRONTIER, load=ExpertLoad.from_counts(shares))
    assert prices.imbalance(EXPERTS, 16) == pytest.approx(34 / 64 * 16)
    assert prices.imbalance(EXPERTS, 1) == 1.0
    assert price(prices).visible_s > price(ExchangePrices(FRONTIER)).visible_s


def test_imbalance_of_uneven_blocks() -> None:
    # 32 experts on 12 ranks: some hold 3, the mean is 2.67
    assert ExchangePrices(FRONTIER).imbalance(EXPERTS, 12) == pytest.approx(3 * 12 / 32)


def test_even_shares_price_like_a_balanced_routing() -> None:
    even = ExchangePrices(FRONTIER, load=ExpertLoad.from_counts([5] * 32))
    balanced = ExchangePrices(FRONTIER)
    assert price(even).visible_s == pytest.approx(price(balanced).visible_s, rel=0.02)
    assert even.imbalance(EXPERTS, 16) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("counts", "match"),
    [([], ">= 0, one for each"), ([1, -1], ">= 0"), ([float("nan")], ">= 0"), ([0, 0], "a row")],
)
def test_expert_load_refuses_what_is_no_load(counts: list[float], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ExpertLoad.from_counts(counts)


def test_expert_load_must_fit_the_layer() -> None:
    prices = ExchangePrices(FRONTIER, load=ExpertLoad.from_counts([1, 2]))
    with pytest.raises(ConfigError, match="one share for each of the 32 experts, got 2"):
        prices.imbalance(EXPERTS, 16)


def test_rank_shares_sum_to_one() -> None:
    load = ExpertLoad.from_counts(list(np.arange(1, 33)))
    assert load.rank_shares(5).sum() == pytest.approx(1)
