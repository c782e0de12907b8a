"""A Hugging Face causal MoE model from a configuration. Nothing is downloaded."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.errors import ConfigError, did_you_mean, instruction, require
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.strict_model import digest_of
from piper_kernels.train.families import FAMILIES
from piper_kernels.train.settings import TrainSettings


def build_model(settings: TrainSettings, vocab_size: int, device: torch.device) -> nn.Module:
    """Build the model that the settings name, with float32 weights drawn from ``settings.seed``.

    Args:
        settings: ``model``, ``model_override``, ``experts``, ``checkpoint_activations``, ``seed``.
        vocab_size: number of token ids that the text uses.
        device: where the weights go.

    Returns:
        A causal language model in training mode; its experts run as ``settings.experts`` says.

    Raises:
        ConfigError: if the configuration is unknown, impossible, or has no switchable experts.
    """
    from transformers import AutoModelForCausalLM

    config = build_config(settings, vocab_size)
    check_experts_implementation(settings.experts)
    torch.manual_seed(settings.seed)
    try:
        model = AutoModelForCausalLM.from_config(
            config, experts_implementation=settings.experts, dtype=torch.float32
        )
    except Exception as error:
        value = f"{settings.model} with {settings.model_override} ({_one_line(error)})"
        requirement = "be a causal language model that can be built"
        raise ConfigError(instruction("build_model", "model", requirement, value)) from error
    require(
        bool(expert_modules(model)),
        "build_model",
        "model",
        "have experts that Hugging Face can switch",
        settings.model,
        "Choose another model type.",
    )
    if settings.checkpoint_activations:
        # its name before transformers 5.24 was gradient_checkpointing_enable
        old = "gradient_checkpointing_enable"
        enable = getattr(model, "activation_checkpointing_enable", getattr(model, old))
        enable({"use_reentrant": False})
    model = model.to(device).train()
    _try_a_step(model, settings, device)
    return model


def _try_a_step(model: nn.Module, settings: TrainSettings, device: torch.device) -> None:
    """Run forward and backward once, on few tokens, before anything depends on the model.

    Configurations exist that can be built but not run: more experts per token than experts, widths
    that do not divide, experts that need another dtype or package. No random number is used up.

    Raises:
        ConfigError: with what the model raised.
    """
    tokens = torch.zeros(1, min(settings.sequence_length, 8), dtype=torch.int64, device=device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with torch.autocast(
                device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16"
            ):
                logits, _ = forward_logits(model, tokens)
            logits.float().sum().backward()
    # the model's code is not ours, and raises whatever it likes
    except Exception as error:
        overrides = f" with {settings.model_override}" if settings.model_override else ""
        value = f"{settings.model}{overrides} and {settings.experts} experts"
        requirement = "be able to run"
        remedy = "Change --model-override or --experts."
        what = f"{value} ({_one_line(error)})"
        raise ConfigError(instruction("build_model", "model", requirement, what, remedy)) from error
    model.zero_grad(set_to_none=True)


def build_config(settings: TrainSettings, vocab_size: int) -> Any:
    """The model's configuration: built-in or from a file, then ``model_override`` on top.

    Raises:
        ConfigError: naming the entry that is unknown or does not fit, and the nearest known one.
    """
    from transformers import AutoConfig

    if settings.model.endswith(".json"):
        entries = _read_config(Path(settings.model))
        model_type = entries.pop("model_type")
    else:
        model_type = settings.model
        entries = _built_in(model_type) | {"vocab_size": vocab_size}
    known = entries.keys() | _entries_of(AutoConfig.for_model(model_type))
    for key, value in settings.model_override.items():
        if key not in known:
            requirement = f"be an entry of {model_type}'s configuration"
            remedy = did_you_mean(key, known)
            argument = f"model_override {key}"
            raise ConfigError(
                instruction("build_config", argument, requirement, repr(value), remedy)
            )
    try:
        config = AutoConfig.for_model(model_type, **{**entries, **settings.model_override})
    except Exception as error:
        value = f"{settings.model_override} ({_one_line(error)})"
        raise ConfigError(instruction("build_config", "model_override", "fit", value)) from error
    _check_config(config, settings, vocab_size)
    return config


def check_experts_implementation(name: str) -> None:
    """Raise ``ConfigError`` unless transformers knows experts by this name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # importing it registers "piper"
    import piper_kernels.huggingface  # noqa: F401

    known = ["eager", *ALL_EXPERTS_FUNCTIONS.valid_keys()]
    if name not in known:
        requirement = f"be one of {', '.join(known)}"
        raise ConfigError(
            instruction(
                "build_model", "experts", requirement, repr(name), did_you_mean(name, known)
            )
        )


def choose_device(name: str) -> torch.device:
    """The device that ``settings.device`` means; ``auto`` is CUDA (or ROCm) where there is one.

    Raises:
        ConfigError: if this machine or this torch has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    is_known = re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", name) is not None
    require(is_known, "choose_device", "device", "be auto, cpu, cuda or cuda:N", repr(name))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    require(
        kind == "cpu" or int(index or 0) < count,
        "choose_device",
        "device",
        f"be one of this machine's {count} CUDA devices",
        repr(name),
        "Choose --device cpu, or install a torch built for the GPU.",
    )
    return torch.device(name)


def forward_logits(
    model: Any, inputs: Tensor, *, wants_router_logits: bool = False
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Run the model.

    Args:
        model: from ``build_model``.
        inputs: ``[B, S]`` int64 token ids.
        wants_router_logits: ask for the routers' outputs, where the model can return them.

    Returns:
        Logits ``[B, S, vocab]``; per layer with experts the router's ``[B * S, E]``, or ``None``.
    """
    is_asked = wants_router_logits and hasattr(model.config, "output_router_logits")
    options = {"output_router_logits": True} if is_asked else {}
    outputs = model(input_ids=inputs, use_cache=False, **options)
    return outputs.logits, getattr(outputs, "router_logits", None) or None


def model_digest(model: Any) -> str:
    """A hash of what the model is (configuration, names, shapes, dtypes), not of its weights."""
    config = model.config.to_diff_dict()
    config.pop("transformers_version", None)
    tensors = {
        name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in model.state_dict().items()
    }
    return digest_of(
        json.dumps(config, sort_keys=True, default=str), json.dumps(tensors, sort_keys=True)
    )


def _built_in(model_type: str) -> dict[str, Any]:
    if model_type not in FAMILIES:
        requirement = f"be a config.json or one of {', '.join(sorted(FAMILIES))}"
        remedy = did_you_mean(model_type, FAMILIES)
        raise ConfigError(
            instruction("build_config", "model", requirement, repr(model_type), remedy)
        )
    # byte tokens have no special ones, and a base model needs none
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return FAMILIES[model_type] | special


def _read_config(path: Path) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        value = f"{path} ({_one_line(error)})"
        message = instruction("build_config", "model", "be a readable config.json", value)
        raise ConfigError(message) from None
    model_type = entries.get("model_type") if isinstance(entries, dict) else None
    known = list(CONFIG_MAPPING.keys())
    if model_type not in known:
        requirement = "name a model_type that transformers knows"
        remedy = did_you_mean(str(model_type), known) if model_type else ""
        value = f"{model_type!r} in {path}"
        raise ConfigError(instruction("build_config", "model", requirement, value, remedy))
    return dict(entries)


def _entries_of(config: Any) -> set[str]:
    fields = getattr(type(config), "__dataclass_fields__", {})
    return set(config.to_dict()) | {name for name in fields if not name.startswith("_")}


def _check_config(config: Any, settings: TrainSettings, vocab_size: int) -> None:
    require(
        config.vocab_size >= vocab_size,
        "build_config",
        "vocab_size",
        f"be at least {vocab_size}, the number of token ids",
        config.vocab_size,
        f"Set --model-override vocab_size={vocab_size}.",
    )
    longest = getattr(config, "max_position_embeddings", None) or settings.sequence_length
    require(
        settings.sequence_length <= longest,
        "build_config",
        "sequence_length",
        f"be at most the model's max_position_embeddings = {longest}",
        settings.sequence_length,
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
