"""The time part of ``make validate-model``: published dense steps, weak scaling, search times."""

import time
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from bench.targets import Target
from piper_kernels.dist.links import Link, Links
from piper_kernels.dist.topology import Node, Topology
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.exchange_time import ExchangePrices
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.model_description import FeedForward, Layer, ModelDescription
from piper_kernels.pipeline.plan import split_layers
from piper_kernels.pipeline.planner import search
from piper_kernels.pipeline.platform import Device, Platform
from piper_kernels.pipeline.platform_presets import load_platform
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.search_space import SearchSpace
from piper_kernels.pipeline.step_time import StepModel
from piper_kernels.pipeline.strategy import Strategy

# the one fitted constant of the weak scaling: microbatches a step, which the paper does not give
FITTED_MICROBATCHES = 98
# the one fitted constant of the dense steps: share of the peak that large products reach on an A100
FITTED_GEMM_SHARE = 0.77
# efficiency of Piper on 512 and 1,024 GPUs over 64, from 45.15, 39.38 and 33.04 TFLOPS (2605.05049,
# figure 14)
PUBLISHED_SCALING = {"512 GPUs, (16, 32)": 39.38 / 45.15, "1,024 GPUs, (32, 32)": 33.04 / 45.15}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """One comparison.

    Attributes:
        group: rows of a group share a target.
        name: of the point.
        predicted: seconds, or a ratio.
        measured: as published.
    """

    group: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseStep:
    """A dense GPT whose step was measured on A100s, twice.

    Source: Korthikanti et al. 2022 (2205.05198), tables 3 and 5, as calculon-ai/calculon takes them
    in calculon/llm/validation.py (seqsel_tab5) with validation/seqsel/tab5/*.json.

    Attributes:
        name: of the model.
        num_layers: of it.
        hidden_size: H; the network is 4 H wide and has two matrices.
        num_heads: of attention.
        pp: pipeline ranks; tp is 8 and dp 1.
        num_local: stages a rank.
        global_batch: sequences of 2048 tokens.
        microbatch_size: sequences.
        full_s: measured with full recomputation.
        selective_s: measured with selective recomputation and sequence parallelism.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    pp: int
    num_local: int
    global_batch: int
    microbatch_size: int
    full_s: float
    selective_s: float

    def model(self) -> ModelDescription:
        """Two-matrix networks, layer norms, 51200 words."""
        size = self.hidden_size // self.num_heads
        heads = self.num_heads
        layer = Layer(
            attention=GroupedAttention(num_heads=heads, num_kv_heads=heads, head_dim=size),
            dense=FeedForward(intermediate_size=4 * self.hidden_size, num_matrices=2),
        )
        return ModelDescription(
            name=self.name,
            family="piper",
            vocab_size=51200,
            hidden_size=self.hidden_size,
            layers=(layer,) * self.num_layers,
            norm="layer",
            has_tied_embeddings=True,
        )

    def strategy(self, *, is_full: bool) -> Strategy:
        """As it was run."""
        return Strategy(
            pp=self.pp,
            tp=8,
            schedule="1f1b" if self.num_local == 1 else "interleaved_1f1b",
            num_microbatches=self.global_batch // self.microbatch_size,
            microbatch_size=self.microbatch_size,
            seq_len=2048,
            layers_per_stage=split_layers(self.num_layers, self.pp * self.num_local),
            checkpointing="full" if is_full else "selective",
            is_attention_fused=False,
            is_sequence_parallel=not is_full,
        )


DENSE_STEPS = (
    DenseStep(
        name="22B",
        num_layers=48,
        hidden_size=6144,
        num_heads=64,
        pp=1,
        num_local=1,
        global_batch=4,
        microbatch_size=4,
        full_s=1.42,
        selective_s=1.10,
    ),
    DenseStep(
        name="175B",
        num_layers=96,
        hidden_size=12288,
        num_heads=96,
        pp=8,
        num_local=3,
        global_batch=64,
        microbatch_size=1,
        full_s=18.13,
        selective_s=13.75,
    ),
    DenseStep(
        name="530B",
        num_layers=105,
        hidden_size=20480,
        num_heads=128,
        pp=35,
        num_local=3,
        global_batch=280,
        microbatch_size=1,
        full_s=49.05,
        selective_s=37.83,
    ),
    DenseStep(
        name="1T",
        num_layers=128,
        hidden_size=25600,
        num_heads=160,
        pp=64,
        num_local=1,
        global_batch=512,
        microbatch_size=1,
        full_s=94.42,
        selective_s=71.49,
    ),
)


def selene() -> Platform:
    """Selene, where the dense points were measured: DGX A100 nodes."""
    nic = Link(latency_s=2e-6, bandwidth_bytes_per_s=25e9, efficiency=((1.0, 0.9),))
    gpu = Link(latency_s=1e-6, bandwidth_bytes_per_s=0.6 * 300e9)
    eight = tuple(range(8))
    return Platform(
        name="selene",
        source=(
            "NVIDIA A100 data sheet: 312 TFLOPS fp16, 80 GB, 108 SMs. Memory (2.048 TB/s at 0.9) "
            "and network (0.6 of 300 GB/s, 0.9 of 25 GB/s) as calculon's systems/a100_80g.json. "
            "ASSUMED: tiles, launch overhead; FITTED: the efficiency of large products."
        ),
        device=Device(
            name="A100 80 GB",
            memory_bytes=80 * 2**30,
            peak_flops_per_s=312e12,
            memory_bandwidth_bytes_per_s=2.048e12,
            memory_efficiency=0.9,
            num_compute_units=108,
            gemm_tile_rows=128,
            gemm_tile_columns=128,
            gemm_efficiency=((64.0, 0.5), (128.0, 0.6), (512.0, 0.7), (2048.0, FITTED_GEMM_SHARE)),
            launch_overhead_s=4e-6,
        ),
        topology=Topology(
            name="selene",
            source="the platform's",
            links=Links(node=gpu, group=nic, far=nic),
            nodes=(Node(host="node0", group="group0", ranks=eight, nics=eight),),
        ),
        nodes_per_group=20,
        nodes_per_domain=20,
    )


def dense_rows() -> list[TimeRow]:
    """The eight published steps."""
    prices, rows = ExchangePrices(selene()), []
    for point in DENSE_STEPS:
        steps = StepModel(point.model(), prices)
        for is_full, measured in ((True, point.full_s), (False, point.selective_s)):
            seconds = steps.seconds(point.strategy(is_full=is_full))
            name = f"{point.name}, {'full' if is_full else 'selective'} recomputation"
            rows.append(
                TimeRow(
                    group="published dense steps", name=name, predicted=seconds, measured=measured
                )
            )
    return rows


def frontier_model(num_experts: int) -> ModelDescription:
    """The paper's scaling family. Its sizes count no vocabulary, so it has none here."""
    model = load_model(f"piper-e{num_experts}")
    return replace(model, vocab_size=1)


def scaling_rows() -> list[TimeRow]:
    """Throughput per GPU on Frontier over that on 64 GPUs."""
    prices = ExchangePrices(load_platform("frontier"))
    points = {"64": (16, 8, 8), "512": (128, 16, 32), "1,024": (256, 32, 32)}
    mfu = {}
    for gpus, (num_experts, pp, ep) in points.items():
        steps = StepModel(frontier_model(num_experts), prices)
        strategy = Strategy(
            pp=pp,
            ep=ep,
            num_microbatches=FITTED_MICROBATCHES,
            seq_len=4096,
            layers_per_stage=split_layers(32, pp),
        )
        mfu[gpus] = steps.predict(strategy).mfu
    return [
        TimeRow(
            group="weak scaling on Frontier",
            name=name,
            predicted=mfu[name.split()[0]] / mfu["64"],
            measured=published,
        )
        for name, published in PUBLISHED_SCALING.items()
    ]


def search_rows() -> list[TimeRow]:
    """Seconds of whole searches: DeepSeek-V3 on H100s, four sequences a GPU."""
    rows = []
    for num_gpus, target in ((1024, 1.0), (16384, 5.0)):
        prices = ExchangePrices(load_platform("h100"))
        model = load_model("deepseek-v3")
        steps, memory = StepModel(model, prices), RankMemory(model, prices)
        space = SearchSpace(num_gpus=num_gpus, global_batch=4 * num_gpus, seq_len=4096)
        start = time.perf_counter()
        search(steps, memory.peak_bytes, space, least_bytes=memory.least_bytes)
        seconds = time.perf_counter() - start
        name = f"{num_gpus} GPUs"
        rows.append(TimeRow(group="search, seconds", name=name, predicted=seconds, measured=target))
    return rows


def time_targets(rows: list[TimeRow]) -> list[Target]:
    """What was asked for, of all rows."""

    def errors(group: str) -> list[float]:
        return [100 * abs(row.error) for row in rows if row.group == group]

    def points(group: str) -> list[float]:
        return [100 * abs(r.predicted - r.measured) for r in rows if r.group == group]

    dense = errors("published dense steps")
    targets = [
        Target(
            "published dense steps, mean error %", 3.7, sum(dense) / len(dense), sense="at_most"
        ),
        Target("published dense steps, worst error %", 8.9, max(dense), sense="at_most"),
    ]
    scaling = max(points("weak scaling on Frontier"))
    targets.append(Target("weak scaling, worst error, points", 3.0, scaling, sense="at_most"))
    targets += [
        Target(f"search, {row.name}, s", row.measured, row.predicted, sense="at_most")
        for row in rows
        if row.group == "search, seconds"
    ]
    return targets


def time_rows() -> list[TimeRow]:
    """All comparisons of time."""
    return [*dense_rows(), *scaling_rows(), *search_rows()]


def print_time_rows(rows: list[TimeRow], console: Console) -> None:
    """One table a group. A search's second column is its target."""
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(title=group, title_justify="left")
        for name in ("what", "predicted or taken", "published or target", "error"):
            table.add_column(name, justify="left" if name == "what" else "right")
        for row in (row for row in rows if row.group == group):
            numbers = (f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.error:+.1%}")
            table.add_row(row.name, *numbers)
        console.print(table)
