"""What LoRA on expert weights costs with PEFT: time, and bytes beyond the frozen experts.

    python -m bench.lora_cost --tokens 512 --hidden 1024 --intermediate 2048 --experts 8 --rank 8

One Mixtral experts module of transformers with "piper" experts, forward and backward, the base
weights frozen: without an adapter (also what a merged one costs), and with one on both weights.
PEFT makes ``W + s * B A`` for all experts at each call, so the cost does not depend on the rank.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from bench.record import describe_environment
from bench.report import make_console, print_environment
from bench.stats import quantile
from bench.timing import Budget, Variant, interleave
from piper_kernels.huggingface import lora_targets
from piper_kernels.testing.memory import peak_bytes

MIB = 2**20


class Layer(nn.Module):
    """Experts under a name, as PEFT wants them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        config = MixtralConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.intermediate,
            num_local_experts=arguments.experts,
        )
        config._experts_implementation = "piper"
        self.experts = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.requires_grad_(False)

    def forward(self, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """Run the experts."""
        return self.experts(x, expert_ids, gates)


def adapt(layer: Layer, rank: int) -> nn.Module:
    """PEFT's LoRA on both expert weights, with random factors."""
    config = LoraConfig(r=rank, target_modules=[], target_parameters=lora_targets(layer))
    adapted: nn.Module = get_peft_model(layer, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


def check(layer: Layer, adapted: Any, inputs: tuple[Tensor, ...]) -> None:
    """Refuse to time an adapter that is wrong: merged by PEFT it must compute the same."""
    with torch.no_grad():
        want = adapted(*inputs)
        adapted.merge_adapter()
        have = layer(*inputs)
        adapted.unmerge_adapter()
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def make_variant(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Variant:
    """Forward and backward of one module as a variant."""

    def run() -> None:
        module(*inputs).sum().backward()

    def drop_gradients() -> None:
        inputs[0].grad = None
        module.zero_grad(set_to_none=True)

    return Variant(name=name, run=run, prepare=drop_gradients)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lora_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Check, time, and print a line for each variant."""
    arguments = make_parser().parse_args(words)
    torch.manual_seed(0)
    x = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    scores = torch.rand(arguments.tokens, arguments.experts)
    gates, expert_ids = scores.softmax(-1).topk(arguments.top_k)
    inputs = (x, expert_ids, gates)
    frozen, layer = Layer(arguments), Layer(arguments)
    adapted = adapt(layer, arguments.rank)
    check(layer, adapted, inputs)
    variants = [
        make_variant("frozen experts", frozen, inputs),
        make_variant("with LoRA", adapted, inputs),
    ]
    samples = interleave(variants, Budget(min_rounds=arguments.rounds, max_rounds=arguments.rounds))
    weights_bytes = sum(p.nbytes for p in frozen.parameters())
    console = make_console()
    print_environment(describe_environment(), console)
    console.print(f"peft {peft.__version__}, fp32; {vars(arguments)}")
    console.print(f"expert weights {weights_bytes / MIB:.1f} MiB")
    for variant in variants:
        seconds = samples[variant.name]
        low, middle, high = (quantile(seconds, q) * 1e3 for q in (0.2, 0.5, 0.8))
        variant.prepare()
        at_peak = peak_bytes(variant.run)
        console.print(
            f"{variant.name:<15} {middle:8.1f} ms (p20 {low:.1f}, p80 {high:.1f})  peak "
            f"{at_peak / MIB:8.1f} MiB = {at_peak / weights_bytes:.2f} x weights"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
