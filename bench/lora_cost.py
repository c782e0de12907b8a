"""What LoRA on expert weights costs with PEFT: time, and bytes beyond the frozen experts.

    python -m bench.lora_cost --tokens 512 --hidden 1024 --intermediate 2048 --experts 8 --rank 8

One Mixtral experts module of transformers with "piper" experts, forward and backward, the base
weights frozen: without an adapter (also what a merged one costs), and with one on both weights.
PEFT makes ``W + s * B A`` for all experts at each call, so the cost does not depend on the rank.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

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


def timed_runs(
    variants: dict[str, Callable[[], None]], num_rounds: int
) -> Iterator[tuple[str, float]]:
    """Seconds of each variant, interleaved, after one round of warm-up."""
    for i in range(num_rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if i:
                yield name, time.perf_counter() - start


def main(words: Sequence[str] | None = None) -> None:
    """Print the table for the sizes in ``words`` (default: the process's arguments)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(arguments.tokens, arguments.hidden, requires_grad=True)
    scores = torch.rand(arguments.tokens, arguments.experts)
    gates, expert_ids = scores.softmax(-1).topk(arguments.top_k)
    inputs = (x, expert_ids, gates)
    frozen = Layer(arguments)
    layer = Layer(arguments)
    adapted = adapt(layer, arguments.rank)
    check(layer, adapted, inputs)

    def runner(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            module(*inputs).sum().backward()
            x.grad = None
            module.zero_grad(set_to_none=True)

        return run

    variants = {"frozen experts": runner(frozen), "with LoRA": runner(adapted)}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for name, seconds in timed_runs(variants, arguments.rounds):
        samples[name].append(seconds)
    weights_bytes = sum(p.nbytes for p in frozen.parameters())
    print(f"{arguments}, fp32, 1 thread of {os.cpu_count()} x {platform.processor() or 'CPU'}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}", end=", ")
    print(f"peft {peft.__version__}; expert weights {weights_bytes / MIB:.1f} MiB")
    for name, run in variants.items():
        low, median, high = statistics.quantiles(samples[name], n=10)[1::3]
        bytes_at_peak = peak_bytes(run)
        print(
            f"{name:<15} {median * 1e3:8.1f} ms (p20 {low * 1e3:.1f}, p80 {high * 1e3:.1f})  peak "
            f"{bytes_at_peak / MIB:8.1f} MiB = {bytes_at_peak / weights_bytes:.2f} x weights"
        )


if __name__ == "__main__":
    main()
