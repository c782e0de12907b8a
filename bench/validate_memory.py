"""The memory part of ``make validate-model``: predicted bytes against real tensors and in print."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.memory_runs import (
    attention_kernel,
    measured_saved_bytes,
    measured_static_bytes,
    small_config,
)
from bench.targets import Target
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.memory_settings import (
    ActivationRules,
    AttentionKernel,
    MemorySettings,
    OptimizerRules,
)
from piper_kernels.pipeline.model_config import NAMED_MODELS, load_model, named_models
from piper_kernels.pipeline.model_description import FeedForward, Layer, ModelDescription
from piper_kernels.pipeline.model_families import FAMILIES
from piper_kernels.pipeline.stage_memory import stage_memory
from piper_kernels.testing.tiny_models import model_class

GIB = 2**30
SEQ_LEN = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        group: what kind of bytes; rows of a group share a target.
        name: of the model and the run.
        predicted: bytes.
        measured: bytes, of real or fake tensors, or as published.
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
class DensePoint:
    """A published dense configuration of Korthikanti et al. 2022, Table 3 and Figure 1.

    Source: calculon-ai/calculon, ``calculon/llm/validation.py`` (seqsel_fig1) and
    ``validation/seqsel/fig1/*.json``; arXiv 2205.05198. Sequences of 2048, TP 8, no data
    parallelism, fp16 with fp32 gradients: 18 bytes a parameter.
    """

    name: str
    hidden_size: int
    num_heads: int
    num_layers: int
    pp: int
    num_chunks: int
    microbatch_size: int
    state_gib: float
    none_gib: float
    selective_gib: float


DENSE_POINTS = (
    DensePoint(
        name="22B",
        hidden_size=6144,
        num_heads=64,
        num_layers=48,
        pp=1,
        num_chunks=1,
        microbatch_size=4,
        state_gib=45.5625,
        none_gib=59.25,
        selective_gib=9.5625,
    ),
    DensePoint(
        name="175B",
        hidden_size=12288,
        num_heads=96,
        num_layers=96,
        pp=8,
        num_chunks=3,
        microbatch_size=1,
        state_gib=45.5625,
        none_gib=66.84375,
        selective_gib=12.3515625,
    ),
    DensePoint(
        name="530B",
        hidden_size=20480,
        num_heads=128,
        num_layers=105,
        pp=35,
        num_chunks=3,
        microbatch_size=1,
        state_gib=31.640625,
        none_gib=114.0234375,
        selective_gib=23.076171875,
    ),
    DensePoint(
        name="1T",
        hidden_size=25600,
        num_heads=160,
        num_layers=128,
        pp=64,
        num_chunks=1,
        microbatch_size=1,
        state_gib=32.958984375,
        none_gib=131.25,
        selective_gib=26.5625,
    ),
)


def dense_model(point: DensePoint) -> ModelDescription:
    """The point's GPT, its layers alone: the published bars leave embedding and head out."""
    hidden = point.hidden_size
    attention = GroupedAttention(
        num_heads=point.num_heads,
        num_kv_heads=point.num_heads,
        head_dim=hidden // point.num_heads,
        has_qkv_bias=True,
        has_output_bias=True,
    )
    network = FeedForward(intermediate_size=4 * hidden, num_matrices=2, has_bias=True)
    return ModelDescription(
        name=point.name,
        family="gpt",
        vocab_size=0,
        hidden_size=hidden,
        layers=(Layer(attention=attention, dense=network),) * point.num_layers,
        norm="layer",
        dtype="float16",
    )


def dense_rows() -> Iterator[Row]:
    """The published dense points: states and activations, without and with recomputation."""
    for point in DENSE_POINTS:
        model = dense_model(point)
        rules = ActivationRules(attention="half", has_fused_norms=True, has_dropout=True)
        none = MemorySettings(
            seq_len=2048,
            microbatch_size=point.microbatch_size,
            tp=8,
            activations=rules,
            optimizer=OptimizerRules(gradient_bytes=4),
        )
        selective = replace(
            none,
            checkpointing="selective",
            activations=replace(rules, is_sequence_parallel=True),
        )
        size = point.num_layers // (point.pp * point.num_chunks)
        # chunks that the first rank of interleaved 1F1B has alive; plain 1F1B: PP
        live = point.pp * point.num_chunks + (point.pp - 1) * (point.num_chunks > 1)
        states = point.num_chunks * stage_memory(model, range(size), none).static_bytes
        yield Row(
            group="published dense states",
            name=point.name,
            predicted=states,
            measured=point.state_gib * GIB,
        )
        for name, settings, gib in (
            ("none", none, point.none_gib),
            ("selective + sequence", selective, point.selective_gib),
        ):
            yield Row(
                group="published dense activations",
                name=f"{point.name} {name}",
                predicted=live * stage_memory(model, range(size), settings).activation_bytes,
                measured=gib * GIB,
            )


def _predicted_activations(
    model: ModelDescription, kernel: AttentionKernel, batch: int, seq_len: int
) -> float:
    settings = MemorySettings(
        seq_len=seq_len,
        microbatch_size=batch,
        activations=ActivationRules(attention=kernel),
    )
    return stage_memory(model, range(model.num_layers), settings).activation_bytes


def small_rows() -> Iterator[Row]:
    """Every family small and for real: states after a step, and what the forward keeps."""
    for family in FAMILIES:
        for optimizer, momentum in (("adamw", None), ("sgd_momentum", 0.9)):
            config = small_config(family)
            model = load_model(config.to_dict() | {"dtype": "float32"})
            rules = OptimizerRules(kind="adamw" if momentum is None else "sgd_momentum")
            settings = MemorySettings(seq_len=32, optimizer=rules)
            yield Row(
                group="states, real step",
                name=f"{family} {optimizer}",
                predicted=stage_memory(model, range(model.num_layers), settings).static_bytes,
                measured=measured_static_bytes(config, momentum=momentum),
            )
        for kernel in sorted({attention_kernel(family, one) for one in ("flash", "eager")}):
            config = small_config(family)
            model = load_model(config.to_dict() | {"dtype": "bfloat16"})
            yield Row(
                group="activations, real forward",
                name=f"{family} {kernel}",
                predicted=_predicted_activations(model, kernel, 2, 64),
                measured=measured_saved_bytes(config, kernel, batch=2, seq_len=64),
            )


def full_rows(names: tuple[str, ...] = ()) -> Iterator[Row]:
    """Named models at full size on fake tensors: parameters, and what one sequence keeps.

    Args:
        names: of the models; all that have a class in transformers if empty.
    """
    for name in names or named_models():
        text = (NAMED_MODELS / f"{name}.json").read_text(encoding="utf-8")
        settings = {key: value for key, value in json.loads(text).items() if key != "source"}
        family = settings["model_type"]
        if family not in FAMILIES:
            continue
        model = load_model(name)
        kernel = attention_kernel(family, "flash")
        config = model_class(family).config_class(**settings)
        yield Row(
            group="activations, full size",
            name=f"{name} {kernel}",
            predicted=_predicted_activations(model, kernel, 1, SEQ_LEN),
            measured=measured_saved_bytes(config, kernel, batch=1, seq_len=SEQ_LEN, is_fake=True),
        )


def memory_rows() -> list[Row]:
    """All comparisons of memory."""
    return [*small_rows(), *full_rows(), *dense_rows()]


def memory_targets(rows: list[Row]) -> list[Target]:
    """Worst error of each group of real tensors; mean error of the published points."""

    def worst(group: str) -> float:
        return max(abs(row.error) for row in rows if row.group == group)

    def mean(group: str) -> float:
        errors = [abs(row.error) for row in rows if row.group == group]
        return sum(errors) / len(errors)

    percent = 100.0
    return [
        Target("states, worst error %", 3.0, percent * worst("states, real step"), sense="at_most"),
        *(
            Target(f"{group}, worst error %", 5.0, percent * worst(group), sense="at_most")
            for group in ("activations, real forward", "activations, full size")
        ),
        Target(
            "published dense states, mean error %",
            8.5,
            percent * mean("published dense states"),
            sense="at_most",
        ),
        Target(
            "published dense activations, mean error %",
            5.0,
            percent * mean("published dense activations"),
            sense="at_most",
        ),
    ]
