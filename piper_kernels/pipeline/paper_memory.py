"""Piper's memory model as the paper prints it, a consistent reading of it, and valid strategies.

Pure: no torch, no process group. Source: Piper, arXiv 2605.05049, sections 5.2 to 5.6, as far as
they are known. 16 bytes a parameter; fp16 activations. As printed, the activations of attention
are those of the batch b on every rank, while the experts' are divided by EP. If b is the batch of
the whole expert group, attention has b / EP of it; if b is one rank's, the experts' are not
divided. ``is_as_printed=False`` takes b as the batch of the group, as its communication model
does, and divides both.
Letters: d hidden, L layers, E experts, k top-k, H heads, s sequence, b sequences, M microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_kernels.errors import require
from piper_kernels.pipeline.attention_description import require_size

STATE_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """The sizes that the paper's formulas read.

    Attributes:
        hidden_size: d.
        expert_size: d_ffn.
        num_layers: L.
        num_experts: E.
        top_k: k.
        num_heads: H; counts only without flash attention.
        num_matrices: 3 as printed; the scaling family's sizes come out with 2.
    """

    hidden_size: int
    expert_size: int
    num_layers: int
    num_experts: int
    top_k: int
    num_heads: int = 1
    num_matrices: int = 3

    @property
    def attention_state_bytes(self) -> int:
        """Of one layer: 4 d^2 parameters."""
        return STATE_BYTES * 4 * self.hidden_size**2

    @property
    def experts_state_bytes(self) -> int:
        """Of one layer's experts, all of them."""
        matrices = self.num_matrices * self.hidden_size * self.expert_size
        return STATE_BYTES * self.num_experts * matrices


def activation_bytes(
    model: PaperModel, tokens: float, seq_len: int, ep: int, *, has_flash: bool, is_as_printed: bool
) -> float:
    """Activations of one layer for ``tokens`` = b s of a microbatch.

    ``12 b s d + 4 b H s^2 + (2 b s k / EP)(3 d_ffn + d)`` as printed.
    """
    share = 1 if is_as_printed else ep
    squares = 0 if has_flash else 4 * model.num_heads * seq_len
    attention = tokens * (12 * model.hidden_size + squares) / share
    row = model.num_matrices * model.expert_size + model.hidden_size
    return attention + 2 * tokens * model.top_k * row / ep


def unpartitioned_bytes(
    model: PaperModel, batch: int, seq_len: int, *, has_flash: bool = True
) -> float:
    """M_u: the whole model and batch on one device."""
    per_layer = activation_bytes(
        model, batch * seq_len, seq_len, 1, has_flash=has_flash, is_as_printed=True
    )
    states = model.attention_state_bytes + model.experts_state_bytes
    return model.num_layers * (states + per_layer)


def stage_bytes(
    model: PaperModel,
    batch: int,
    seq_len: int,
    *,
    pp: int,
    ep: int,
    stage: int,
    num_microbatches: int,
    has_flash: bool = True,
    is_as_printed: bool = True,
    schedule: str = "1f1b",
) -> float:
    """M_1F1B(i), or GPipe's: bytes of stage ``i`` on one rank.

    ``(L / PP) (64 d^2 + 48 E / EP d d_ffn + (PP - i) (activations of b / M))``. Our own: 1F1B has
    ``min(PP - i, M)`` microbatches alive and GPipe all M. PP = 1 gives expert-data parallelism.

    Args:
        model: sizes.
        batch: b.
        seq_len: s.
        pp: PP.
        ep: EP.
        stage: i, from 0.
        num_microbatches: M.
        has_flash: leaves the ``s^2`` term out.
        is_as_printed: see the module.
        schedule: ``1f1b`` or ``gpipe``.

    Example:
        PP = EP = 1 is the unpartitioned model.

        >>> model = PaperModel(
        ...     hidden_size=64, expert_size=128, num_layers=4, num_experts=8, top_k=2)
        >>> whole = stage_bytes(model, 4, 32, pp=1, ep=1, stage=0, num_microbatches=1)
        >>> whole == unpartitioned_bytes(model, 4, 32)
        True
    """
    for name, size in (("pp", pp), ("ep", ep), ("num_microbatches", num_microbatches)):
        require_size("stage_bytes", name, size)
    require(0 <= stage < pp, "stage_bytes", "stage", f"be in 0 .. {pp - 1}", stage)
    fits = schedule in ("1f1b", "gpipe")
    require(fits, "stage_bytes", "schedule", "be 1f1b or gpipe", repr(schedule))
    live = num_microbatches if schedule == "gpipe" else min(pp - stage, num_microbatches)
    states = model.attention_state_bytes + model.experts_state_bytes / ep
    kept = activation_bytes(
        model,
        batch * seq_len / num_microbatches,
        seq_len,
        ep,
        has_flash=has_flash,
        is_as_printed=is_as_printed,
    )
    return model.num_layers / pp * (states + live * kept)


def stage_skew_bytes(
    model: PaperModel,
    batch: int,
    seq_len: int,
    *,
    pp: int,
    ep: int,
    num_microbatches: int,
    has_flash: bool = True,
) -> float:
    """Delta M: what stage 0 holds more than the last one, as printed.

    ``L (PP - 1) / PP`` times the activations of one microbatch in a layer.
    """
    tokens = batch * seq_len / num_microbatches
    kept = activation_bytes(model, tokens, seq_len, ep, has_flash=has_flash, is_as_printed=True)
    return model.num_layers * (pp - 1) / pp * kept


def valid_strategies(
    model: PaperModel,
    num_gpus: int,
    *,
    gpus_per_node: int = 8,
    nodes_per_domain: int = 4,
    stage_0_bytes: Sequence[tuple[int, int, float]] = (),
    memory_bytes: float = float("inf"),
) -> list[tuple[int, int]]:
    """The (PP, EP) that section 5.6 allows, largest EP first.

    PP EP = GPUs, EP divides E, PP divides L (equal stages), EP is at most a fast domain, and, where
    given, stage 0 fits.

    Args:
        model: sizes.
        num_gpus: GPUs in all.
        gpus_per_node: g.
        nodes_per_domain: N_h.
        stage_0_bytes: ``(PP, EP, bytes)`` of stage 0; pairs not listed are taken to fit.
        memory_bytes: of a GPU.

    Example:
        >>> model = PaperModel(hidden_size=5120, expert_size=20480, num_layers=32, num_experts=256,
        ...     top_k=2, num_matrices=2)
        >>> valid_strategies(model, 1024)
        [(32, 32)]
    """
    require_size("valid_strategies", "num_gpus", num_gpus)
    too_large = {(pp, ep) for pp, ep, size in stage_0_bytes if size > memory_bytes}
    domain = gpus_per_node * nodes_per_domain
    return [
        (num_gpus // ep, ep)
        for ep in range(min(domain, num_gpus), 0, -1)
        if num_gpus % ep == 0
        and model.num_experts % ep == 0
        and num_gpus // ep <= model.num_layers
        and model.num_layers % (num_gpus // ep) == 0
        and (num_gpus // ep, ep) not in too_large
    ]
