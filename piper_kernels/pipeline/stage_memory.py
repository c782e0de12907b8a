"""Bytes of one pipeline stage on one rank: what is always there, and what a microbatch adds.

Pure: no torch, no process group. Everything is counted from total, not active, parameters.
Letters: H hidden_size, E num_experts, K top_k, T tokens of a microbatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from piper_kernels.errors import PlanError, require
from piper_kernels.pipeline.memory_settings import STATE_BYTES, MemorySettings, OptimizerRules
from piper_kernels.pipeline.model_description import Layer, ModelDescription
from piper_kernels.pipeline.saved_tensors import (
    FP32_BYTES,
    TOKEN_ID_BYTES,
    SavedTensor,
    bytes_per_token,
    saved_by_head,
    saved_by_layer,
    saved_by_rotary,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one stage on one rank.

    Attributes:
        parameter_bytes: of the parameters.
        gradient_bytes: of their gradients.
        master_bytes: of fp32 master weights.
        optimizer_bytes: of the optimizer's state.
        activation_bytes: what one microbatch keeps from forward to backward.
        recompute_bytes: what comes back during a backward, because it was not kept.
        workspace_bytes: most that a forward or backward needs besides.
        communication_bytes: send and receive buffers of exchange and pipeline.
    """

    parameter_bytes: float
    gradient_bytes: float
    master_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    recompute_bytes: float
    workspace_bytes: float
    communication_bytes: float

    @property
    def static_bytes(self) -> float:
        """There from the first step to the last."""
        states = self.master_bytes + self.optimizer_bytes
        return self.parameter_bytes + self.gradient_bytes + states

    @property
    def transient_bytes(self) -> float:
        """On top while a microbatch passes."""
        return self.recompute_bytes + self.workspace_bytes


def num_local_experts(num_experts: int, ep_size: int) -> int:
    """Most experts that a rank holds: E need not divide evenly.

    Example:
        >>> num_local_experts(60, 16)
        4
    """
    return -(-num_experts // ep_size)


def _count_layers(model: ModelDescription, layers: range) -> list[tuple[Layer, int]]:
    """The different layers of a stage and how many of each: equal ones are one object."""
    counted: dict[int, tuple[Layer, int]] = {}
    for layer in model.layers[layers.start : layers.stop]:
        _, count = counted.get(id(layer), (layer, 0))
        counted[id(layer)] = layer, count + 1
    return list(counted.values())


def _parameters_of_layer(
    model: ModelDescription, layer: Layer, settings: MemorySettings
) -> tuple[float, float]:
    """Parameters of a layer on one rank: ``(replicated, experts)``."""
    parts, tp_size = model.parameters_of(layer), settings.tp
    projections = layer.attention.projections(model.hidden_size)
    attention = sum(one.parameters_per_rank(tp_size) for one in projections)
    attention += parts.attention - sum(one.num_parameters for one in projections)
    replicated = attention + parts.norms + parts.router + (parts.dense + parts.shared) / tp_size
    local = num_local_experts(parts.num_experts, settings.ep)
    return replicated, local * parts.expert / tp_size


def _parameters_of_stage(
    model: ModelDescription,
    layers: range,
    counted: list[tuple[Layer, int]],
    settings: MemorySettings,
) -> tuple[float, float]:
    """Parameters of a stage on one rank: ``(replicated, experts)``."""
    replicated = experts = 0.0
    for layer, count in counted:
        whole, sharded = _parameters_of_layer(model, layer, settings)
        replicated += count * whole
        experts += count * sharded
    is_first, is_last = layers.start == 0, layers.stop == model.num_layers
    if is_first:
        replicated += model.embedding_parameters / settings.tp
    if is_last:
        replicated += model.norm_parameters + model.head_parameters / settings.tp
        # a tied head needs the embedding's weight where the head is
        if model.has_tied_embeddings and not is_first:
            replicated += model.embedding_parameters / settings.tp
    return replicated, experts


def _state_bytes(rules: OptimizerRules, element: int) -> tuple[float, float]:
    """Bytes for each parameter: ``(master weight, optimizer state)``."""
    master = FP32_BYTES if rules.has_master_weights and element < FP32_BYTES else 0
    return master, STATE_BYTES[rules.kind]


def kept_by_layer(
    model: ModelDescription, layer: Layer, settings: MemorySettings
) -> tuple[float, float]:
    """Bytes a token that a layer keeps, and those that its backward brings back.

    Returns:
        ``(kept, recomputed)``.
    """
    rules, element = settings.activations, model.element_bytes
    saved = saved_by_layer(model, layer, settings.seq_len, rules, settings.ep)
    core = [one for one in saved if one.is_core]
    everything = bytes_per_token(saved, rules, settings.tp)
    if settings.checkpointing == "full":
        layer_input = [SavedTensor("layer.input", model.hidden_size * element)]
        return bytes_per_token(layer_input, rules, settings.tp), everything
    if settings.checkpointing == "selective":
        dropped = bytes_per_token(core, rules, settings.tp)
        return everything - dropped, dropped
    return everything, 0.0


def _workspace_of_layer(model: ModelDescription, layer: Layer, settings: MemorySettings) -> float:
    """Bytes a token that a layer's backward needs besides: the largest of its two halves.

    Experts: gradient of the pre-activation, weighted activation, gradient of the rows. A dense
    network likewise, with one row a token.
    """
    element, hidden, tp_size = model.element_bytes, model.hidden_size, settings.tp
    if layer.experts is None:
        assert layer.dense is not None
        network, rows = layer.dense, 1.0
    else:
        network, rows = layer.experts.network, layer.experts.top_k * settings.activations.imbalance
    inner = (network.preact_size + network.intermediate_size) / tp_size
    attention = layer.attention
    heads = 2 * attention.q_size + 2 * attention.num_heads * attention.v_dim
    return element * max(rows * (inner + hidden), heads / tp_size + hidden)


def _workspace_of_head(model: ModelDescription, settings: MemorySettings) -> float:
    """Bytes a token of logits, their gradient, and the gradient of the log-probabilities."""
    logits = model.vocab_size / settings.tp
    return logits * (2 * model.element_bytes + FP32_BYTES)


def _communication(model: ModelDescription, layers: range, settings: MemorySettings) -> float:
    """Bytes a token of the exchange's send buffers, and of the pipeline's receive buffers."""
    row = model.hidden_size * model.element_bytes
    top_k = max((one.experts.top_k for one in model.layers if one.experts), default=0)
    # rows out and rows back; those that arrive are kept and counted as activations
    exchanged = 2 * top_k * row if settings.ep > 1 else 0
    num_neighbours = (layers.start > 0) + (layers.stop < model.num_layers)
    return exchanged + num_neighbours * row


def _boundaries(
    model: ModelDescription, layers: range, settings: MemorySettings
) -> Iterator[SavedTensor]:
    """What a stage keeps at its ends for each live microbatch, besides what its layers keep."""
    row = model.hidden_size * model.element_bytes
    # a norm that keeps its input as it is, or a checkpointed layer, keeps the stage's input anyway
    is_fused = model.norm == "layer" or settings.activations.has_fused_norms
    is_kept = is_fused or model.element_bytes == FP32_BYTES or settings.checkpointing == "full"
    if layers.start > 0 and not is_kept:
        yield SavedTensor("stage.input", row)
    if layers.start == 0:
        yield SavedTensor("embedding.ids", TOKEN_ID_BYTES)
    if layers.stop < model.num_layers:
        yield SavedTensor("stage.output", row)


def stage_memory(model: ModelDescription, layers: range, settings: MemorySettings) -> StageMemory:
    """Memory of the stage that holds consecutive ``layers``.

    The first stage has the embedding, the last one the head and the loss.

    Args:
        model: the whole model.
        layers: indices of the stage's layers.
        settings: mesh, microbatch, optimizer, kernels.

    Raises:
        PlanError: the range is empty, has steps, or leaves the model.

    Example:
        Mixtral-8x7B on one rank: 2 + 2 + 4 + 8 bytes a parameter.

        >>> from piper_kernels.pipeline.model_config import load_model
        >>> model = load_model("mixtral-8x7b")
        >>> memory = stage_memory(model, range(32), MemorySettings(seq_len=4096))
        >>> memory.static_bytes == 16 * model.num_parameters
        True
    """
    fits = layers.step == 1 and 0 <= layers.start < layers.stop <= model.num_layers
    requirement = f"be consecutive and within the model's {model.num_layers}"
    require(fits, "stage_memory", "layers", requirement, layers, error=PlanError)
    rules, tp_size, tokens = settings.activations, settings.tp, settings.num_tokens
    element, optimizer = model.element_bytes, settings.optimizer
    counted = _count_layers(model, layers)
    replicated, experts = _parameters_of_stage(model, layers, counted, settings)
    shards = (settings.dp * settings.ep, settings.dp) if optimizer.is_sharded else (1, 1)
    sharded = replicated / shards[0] + experts / shards[1]
    master, state = _state_bytes(optimizer, element)
    kept = [kept_by_layer(model, layer, settings) for layer, _ in counted]
    most_workspace = max(_workspace_of_layer(model, layer, settings) for layer, _ in counted)
    ends = [*_boundaries(model, layers, settings), *saved_by_rotary(model)]
    if layers.stop == model.num_layers:
        ends += saved_by_head(model, rules)
        most_workspace = max(most_workspace, _workspace_of_head(model, settings))
    per_token = bytes_per_token(ends, rules, tp_size)
    per_token += sum(count * each for (_, count), (each, _) in zip(counted, kept, strict=True))
    return StageMemory(
        parameter_bytes=(replicated + experts) * element,
        gradient_bytes=(replicated + experts) * (optimizer.gradient_bytes or element),
        master_bytes=sharded * master,
        optimizer_bytes=sharded * state,
        activation_bytes=per_token * tokens,
        recompute_bytes=max(recomputed for _, recomputed in kept) * tokens,
        workspace_bytes=most_workspace * tokens,
        communication_bytes=_communication(model, layers, settings) * tokens,
    )
