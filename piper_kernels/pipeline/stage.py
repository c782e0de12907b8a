"""One stage of a pipeline: consecutive layers of a Hugging Face causal MoE model, as a module.

The model's own code runs, unedited. A stage is the whole model with other stages' layers replaced
by modules that hand their input on, so every layer keeps its number: masks chosen by layer number,
parameter names and checkpoint keys are those of the whole model. Embedding, final norm and head
exist where they are used only.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import ConfigError, PlanError, instruction, require
from piper_kernels.huggingface.balancing import mean_balance_loss, mean_z_loss
from piper_kernels.huggingface.expert_counts import ExpertCounter, expert_modules
from piper_kernels.pipeline.aux_loss import add_loss

_REMEDY = "Train it without a pipeline: pp = 1."


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """Which part of the model a stage is.

    Attributes:
        index: of the stage, from the input to the output.
        num_stages: of the whole model.
        layers: numbers of its layers.
    """

    index: int
    num_stages: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.index == self.num_stages - 1


class PassOn(nn.Module):
    """Stands in place of another stage's layer, norm or head: returns its first input.

    Args:
        original: what it replaces; models ask layers for plain settings like ``attention_type``.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Hand on."""
        return hidden_states


def base_model(model: nn.Module) -> Any:
    """The part of a causal language model that has the layers.

    Raises:
        ConfigError: there is none, or it lacks what a stage is cut at.
    """
    base = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
    missing = [name for name in ("layers", "embed_tokens", "norm") if not hasattr(base, name)]
    if missing or not hasattr(model, "lm_head"):
        value = f"{type(model).__name__} without {', '.join(missing) or 'lm_head'}"
        requirement = "be a causal language model with layers, embed_tokens, norm and lm_head"
        raise ConfigError(instruction("Stage", "model", requirement, value, _REMEDY))
    return base


def cut_stage(model: nn.Module, place: StagePlace) -> int:
    """Take away, in place, what other stages hold; nothing is computed, so meta tensors are fine.

    Args:
        model: the whole causal language model.
        place: which part to keep.

    Returns:
        How many layers of the whole model have experts.

    Raises:
        PlanError: the place names no layers of this model.
        ConfigError: the model is not built as Hugging Face's causal language models are.
    """
    base = base_model(model)
    num_layers, layers = len(base.layers), place.layers
    fits = 0 <= layers.start < layers.stop <= num_layers and layers.step == 1
    requirement = f"be consecutive numbers in 0 .. {num_layers - 1}, one at least"
    require(fits, "cut_stage", "layers", requirement, layers, error=PlanError)
    num_expert_layers = len(expert_modules(model))
    for number in set(range(num_layers)) - set(layers):
        base.layers[number] = PassOn(base.layers[number])
    if not place.is_first:
        base.embed_tokens = None
        if hasattr(base, "embedding_multiplier"):
            # Granite scales what it is given as embedding: the first stage has done that
            base.embedding_multiplier = 1.0
    if not place.is_last:
        base.norm = PassOn(base.norm)
        model.lm_head = PassOn(model.get_submodule("lm_head"))
    return num_expert_layers


class Stage(nn.Module):
    """Layers of a model between tokens or hidden states, and hidden states or logits.

    Args:
        model: what :func:`cut_stage` left of a model, with its weights.
        place: the same.
        num_expert_layers: of the whole model, as :func:`cut_stage` returned it.

    Raises:
        ConfigError: the model's own code changes what one stage hands to the next.

    Attributes:
        place: which part it is.
        model: the model with this stage's layers, under its own names.
        counter: rows of each expert in this stage's layers; ``None`` if no layer has experts.
        balance_scale: what the mean balance loss of a microbatch, over all layers of the model, is
            multiplied by before it is added; 0 adds none.
        z_scale: likewise for the routers' z-loss.
        share: of the microbatch in the step: a factor of both, and of what is recorded.
        balance_loss: what was added so far, before its scale; whoever reads it sets it to 0.
        z_loss: likewise.
        tied_weight: the embedding or head that another stage holds, too: their gradients must be
            summed; ``None`` if the model does not tie them or one stage holds both.
    """

    def __init__(self, model: nn.Module, place: StagePlace, num_expert_layers: int) -> None:
        super().__init__()
        self.model: Any = model
        self.place = place
        self.num_expert_layers = num_expert_layers
        self.balance_scale = 0.0
        self.z_scale = 0.0
        self.share: Tensor | float = 1.0
        zero = torch.zeros((), dtype=torch.float64)
        self.balance_loss = zero.to(next(model.parameters()).device)
        self.z_loss = self.balance_loss.clone()
        self.counter = ExpertCounter(model) if expert_modules(model) else None
        self.tied_weight = _tied_weight(model, place)
        self._router_logits: tuple[Tensor, ...] = ()
        base = base_model(model)
        if self.counter is not None and hasattr(self.model.config, "output_router_logits"):
            base.register_forward_pre_hook(self._ask_for_router_logits, with_kwargs=True)
            base.register_forward_hook(self._keep_router_logits)
        if not place.is_first:
            _check_hands_on(base)

    def forward(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run the stage.

        Args:
            inputs: token ids ``[B, S]`` int64 in the first stage, else hidden states ``[B, S, H]``.
            attention_mask: ``[B, S]``, 1 for tokens and 0 for padding; the same in every stage.

        Returns:
            Logits ``[B, S, vocab]`` in the last stage, else hidden states ``[B, S, H]``.
        """
        options: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": False}
        options["input_ids" if self.place.is_first else "inputs_embeds"] = inputs
        if self.counter is None or not self.training:
            output = self._run(options)
        else:
            with self.counter.counting(attention_mask):
                output = self._run(options)
        if self._router_logits and self.counter is not None:
            return add_loss(output, self._router_losses(self.counter, attention_mask))
        # a view breaks the schedules that split the backward, and hangs their peers
        return output.clone() if output._is_view() else output

    def _router_losses(self, counter: ExpertCounter, mask: Tensor | None) -> Tensor:
        """This stage's part of the microbatch's balance and z-loss, scaled."""
        router_logits, self._router_logits = self._router_logits, ()
        share = self.share * len(router_logits) / self.num_expert_layers
        total = router_logits[0].new_zeros(())
        if self.balance_scale > 0:
            loss = share * mean_balance_loss(router_logits, counter, mask)
            self.balance_loss += loss.detach()
            total = total + self.balance_scale * loss
        if self.z_scale > 0:
            loss = share * mean_z_loss(router_logits, mask)
            self.z_loss += loss.detach()
            total = total + self.z_scale * loss
        return total

    def _run(self, options: dict[str, Any]) -> Tensor:
        if self.place.is_last:
            logits: Tensor = self.model(**options).logits
            return logits
        hidden: Tensor = base_model(self.model)(**options).last_hidden_state
        return hidden

    def _ask_for_router_logits(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Ask the base model only: the causal model would compute a loss of its own from them."""
        is_asked = self.training and (self.balance_scale > 0 or self.z_scale > 0)
        return args, {**kwargs, "output_router_logits": True} if is_asked else kwargs

    def _keep_router_logits(self, module: nn.Module, args: Any, output: Any) -> None:
        self._router_logits = getattr(output, "router_logits", None) or ()


def is_tied(model: Any) -> bool:
    """Whether the head's weights are the embedding's."""
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _tied_weight(model: Any, place: StagePlace) -> nn.Parameter | None:
    if not is_tied(model) or place.is_first == place.is_last:
        return None
    holder = base_model(model).embed_tokens if place.is_first else model.lm_head
    weight: nn.Parameter = holder.weight
    return weight


def _check_hands_on(base: Any) -> None:
    """Skip all layers: what comes out must be what went in.

    Families exist that scale hidden states before the first layer; a second scaling in a later
    stage would train another model without a word.
    """
    parameter = next(base.parameters())
    given = torch.linspace(-1, 1, 2 * base.config.hidden_size, dtype=parameter.dtype)
    given = given.view(1, 2, -1).to(parameter.device)
    layers, norm = base.layers, base.norm
    try:
        base.layers = nn.ModuleList(map(PassOn, layers))
        base.norm = PassOn(norm)
        with torch.no_grad():
            found = base(inputs_embeds=given, use_cache=False).last_hidden_state
    except AttributeError as error:
        requirement = "ask its layers for nothing but their output"
        value = f"{type(base).__name__} ({error})"
        raise ConfigError(instruction("Stage", "model", requirement, value, _REMEDY)) from error
    finally:
        base.layers, base.norm = layers, norm
    if not torch.equal(found, given):
        change = float((found - given).abs().max())
        value = f"{type(base).__name__}, which changes them by up to {change:.3g}"
        requirement = "hand hidden states to its first layer unchanged"
        raise ConfigError(instruction("Stage", "model", requirement, value, _REMEDY))
