"""Gates and losses equal those of Hugging Face's own routers, on tiny random configs (A30)."""

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from piper_kernels.balance import balance_loss
from piper_kernels.config import RouterConfig
from piper_kernels.routing import Routing, route

pytest.importorskip("transformers")


@dataclasses.dataclass(frozen=True)
class Family:
    """A router class of transformers, the config that builds it, and ours for the same thing."""

    model: str
    router: str
    config: str
    num_experts_name: str
    options: dict[str, Any]
    ours: RouterConfig

    def build(self, num_experts: int, top_k: int) -> torch.nn.Module:
        sizes = {self.num_experts_name: num_experts, "num_experts_per_tok": top_k}
        home = f"transformers.models.{self.model}"
        configs = importlib.import_module(f"{home}.configuration_{self.model}")
        modeling = importlib.import_module(f"{home}.modeling_{self.model}")
        config = getattr(configs, self.config)(hidden_size=16, **self.options, **sizes)
        router: torch.nn.Module = getattr(modeling, self.router)(config)
        with torch.no_grad():
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.normal_()
        return router


SOFTMAX = RouterConfig(is_normalized=False)
CHOICE_FIRST = RouterConfig(kind="topk_softmax")
DEEPSEEK_V3 = RouterConfig(
    kind="sigmoid_topk",
    scaling_factor=2.5,
    num_groups=4,
    num_selected_groups=2,
    group_score="top2_sum",
    has_correction_bias=True,
)
V3_OPTIONS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V2_OPTIONS = {**V3_OPTIONS, "routed_scaling_factor": 1.5, "num_attention_heads": 2}

FAMILIES = {
    "mixtral": Family(
        "mixtral", "MixtralTopKRouter", "MixtralConfig", "num_local_experts", {}, RouterConfig()
    ),
    "deepseek_v2_greedy": Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        "n_routed_experts",
        {**V2_OPTIONS, "topk_method": "greedy"},
        dataclasses.replace(SOFTMAX, scaling_factor=1.5),
    ),
    "deepseek_v2_group_limited_greedy": Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        "DeepseekV2Config",
        "n_routed_experts",
        {**V2_OPTIONS, "topk_method": "group_limited_greedy"},
        dataclasses.replace(SOFTMAX, scaling_factor=1.5, num_groups=4, num_selected_groups=2),
    ),
    "granitemoe": Family(
        "granitemoe",
        "GraniteMoeTopKRouter",
        "GraniteMoeConfig",
        "num_local_experts",
        {},
        CHOICE_FIRST,
    ),
    "gpt_oss": Family(
        "gpt_oss", "GptOssTopKRouter", "GptOssConfig", "num_local_experts", {}, CHOICE_FIRST
    ),
}
for is_normalized in (False, True):
    suffix = "normalized" if is_normalized else "plain"
    for model, name in (("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"), ("olmoe", "Olmoe")):
        FAMILIES[f"{model}_{suffix}"] = Family(
            model,
            f"{name}TopKRouter",
            f"{name}Config",
            "num_experts",
            {"norm_topk_prob": is_normalized},
            RouterConfig(is_normalized=is_normalized),
        )
    for model, name in (("deepseek_v3", "DeepseekV3"), ("glm4_moe", "Glm4Moe")):
        FAMILIES[f"{model}_{suffix}"] = Family(
            model,
            f"{name}TopkRouter",
            f"{name}Config",
            "n_routed_experts",
            {**V3_OPTIONS, "norm_topk_prob": is_normalized},
            dataclasses.replace(DEEPSEEK_V3, is_normalized=is_normalized),
        )

SIZES = [(8, 2), (12, 1), (16, 5)]


def by_expert(expert_ids: Tensor, values: Tensor, num_experts: int) -> Tensor:
    """``[T, E]``: values at their experts, 0 elsewhere. Routers differ in the order of the K."""
    return torch.zeros(len(expert_ids), num_experts).scatter(1, expert_ids, values.float())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("num_experts", "top_k"), SIZES, ids=lambda n: str(n))
def test_route_equals_hugging_face(name: str, num_experts: int, top_k: int) -> None:
    family = FAMILIES[name]
    router = family.build(num_experts, top_k)
    hidden = torch.randn(40, 16, requires_grad=True)
    logits, gates, expert_ids = router(hidden)
    bias = getattr(router, "e_score_correction_bias", None)
    assert (bias is not None) == family.ours.has_correction_bias
    ours = route(logits, top_k, family.ours, correction_bias=bias)
    assert ours.num_experts == num_experts
    got = by_expert(ours.expert_ids, ours.gates, num_experts)
    want = by_expert(expert_ids, gates, num_experts)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got > 0, want > 0)
    assert torch.equal(ours.logits, logits)
    upstream = torch.randn(40, num_experts)
    (got_grad,) = torch.autograd.grad((got * upstream).sum(), hidden, retain_graph=True)
    (want_grad,) = torch.autograd.grad((want * upstream).sum(), hidden)
    # with K = 1 normalised theirs is the rounding of 0
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_balance_loss_per_token_equals_hugging_face(has_mask: bool, top_k: int) -> None:
    """Theirs pools the counts of all layers (A39), so one layer is compared."""
    mixtral = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(3 * 6, 8, requires_grad=True)
    mask = torch.rand(3, 6) < 0.7 if has_mask else None
    theirs = mixtral.load_balancing_loss_func((logits,), 8, top_k, mask)
    routing: Routing = route(
        logits, top_k, RouterConfig(), mask=None if mask is None else mask.reshape(-1)
    )
    ours = balance_loss(routing, normalization="per_token")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)
