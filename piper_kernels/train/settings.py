"""Every setting of a training run, once: TOML keys and flags are both made from this class."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from piper_kernels.errors import ConfigError, instruction, require
from piper_kernels.strict_model import StrictModel

Precision = Literal["fp32", "bf16"]
NonFinite = Literal["stop", "skip"]


def _setting(group: str, default: Any, text: str, *, is_free: bool = False, **limits: Any) -> Any:
    """Declare a setting; ``is_free`` ones may change on --resume: they do not change the curve."""
    extra: dict[str, JsonValue] = {"group": group, "is_free": is_free}
    return Field(default=default, description=text, json_schema_extra=extra, **limits)


class TrainSettings(StrictModel):
    """What to train, on what, for how long.

    Raises:
        ConfigError: if a value cannot work, alone or beside another one.

    Example:
        >>> TrainSettings(batch_size=8, accumulate=2).microbatch_size
        4
    """

    # a default of Path or tuple is no JSON value
    model_config = ConfigDict(validate_default=False)

    data: tuple[Path, ...] = _setting(
        "data",
        (),
        "text files, .jsonl files or folders of them; none: the documentation topics that "
        "every Python carries",
        is_free=True,
    )
    text_field: str = _setting("data", "text", "the key that holds the text in .jsonl lines")
    tokenizer: Path | None = _setting(
        "data", None, "folder of a saved tokenizer; none: bytes are the tokens"
    )
    keep_repeats: bool = _setting(
        "data",
        False,
        "keep paragraphs that occurred before; without, held-out text stays unseen",
    )
    held_out_fraction: float = _setting(
        "data",
        0.1,
        "share of the text that is only evaluated: one block in round(1 / share)",
        ge=1e-4,
        le=0.5,
    )

    model: str = _setting(
        "model", "olmoe", "a model type with a small built-in size, or the path of a config.json"
    )
    model_override: dict[str, JsonValue] = _setting(
        "model", {}, "entries of the model's configuration to change, e.g. num_experts=16"
    )
    experts: str = _setting(
        "model", "piper", "experts implementation: piper, grouped_mm, eager, ..."
    )
    balance_loss_weight: float = _setting(
        "model",
        0.01,
        "weight of the load-balancing loss; models with a correction bias have none",
        ge=0.0,
    )
    correction_bias_speed: float = _setting(
        "model",
        1e-3,
        "step of the loss-free balancing of models with one, like DeepSeek-V3",
        ge=0.0,
    )
    z_loss_weight: float = _setting(
        "model", 0.0, "weight of the routers' z-loss, which keeps their logits small", ge=0.0
    )
    precision: Precision = _setting(
        "model", "fp32", "bf16: autocast to bfloat16; weights and moments stay float32"
    )
    checkpoint_activations: bool = _setting(
        "model", False, "recompute each layer in backward to save memory"
    )

    # a checkpoint's name has room for 8 digits
    steps: int = _setting("training", 400, "optimizer steps", ge=1, lt=10**8)
    batch_size: int = _setting("training", 16, "sequences per step", ge=1)
    accumulate: int = _setting("training", 1, "microbatches that a step is cut into", ge=1)
    sequence_length: int = _setting("training", 128, "tokens per sequence", ge=2)
    seed: int = _setting(
        "training", 0, "seed of the weights and of the order of the data", ge=0, lt=2**64
    )
    device: str = _setting("training", "auto", "auto, cpu, cuda or cuda:N")
    threads: int = _setting(
        "training", 0, "CPU threads; 0: as many as torch chooses", is_free=True, ge=0, le=1024
    )

    learning_rate: float = _setting("optimizer", 3e-3, "highest learning rate of AdamW", gt=0.0)
    final_learning_rate_fraction: float = _setting(
        "optimizer", 0.1, "where the cosine ends, as a share of the highest", ge=0.0, le=1.0
    )
    warmup_fraction: float = _setting(
        "optimizer", 0.05, "share of the steps in which the rate rises", ge=0.0, lt=1.0
    )
    weight_decay: float = _setting(
        "optimizer", 0.1, "decay of matrices; norms and biases have none", ge=0.0
    )
    beta1: float = _setting("optimizer", 0.9, "decay of the first moment", ge=0.0, lt=1.0)
    beta2: float = _setting("optimizer", 0.95, "decay of the second moment", ge=0.0, lt=1.0)
    epsilon: float = _setting("optimizer", 1e-8, "AdamW's denominator guard", gt=0.0)
    clip_norm: float = _setting("optimizer", 1.0, "largest gradient norm", gt=0.0)
    non_finite: NonFinite = _setting(
        "optimizer",
        "stop",
        "what to do when loss or gradient is no finite number: stop, or skip the step (ranks only)",
        is_free=True,
    )

    out: Path = _setting("run", Path("runs/train"), "folder of the run", is_free=True)
    timeout_s: float = _setting(
        "run",
        600.0,
        "seconds after which a rank that does not answer is given up",
        is_free=True,
        gt=0.0,
        le=1e6,
    )
    checkpoint_every: int = _setting("run", 100, "steps between checkpoints", is_free=True, ge=1)
    keep_checkpoints: int = _setting(
        "run", 2, "how many checkpoints stay on disk", is_free=True, ge=1
    )
    evaluate_every: int = _setting(
        "run", 100, "steps between evaluations on the held-out text", is_free=True, ge=1
    )
    prompt: str | None = _setting(
        "run", None, "what the closing sample continues; none: held-out text", is_free=True
    )
    sample_tokens: int = _setting(
        "run", 300, "length of the closing sample; 0: none", is_free=True, ge=0
    )
    compare_rounds: int = _setting(
        "run", 5, "timed rounds of the closing comparison; 0: none", is_free=True, ge=0
    )

    @field_validator("data", mode="after")
    @classmethod
    def _absolute_paths(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        # a run may be resumed from another folder
        return tuple(_at_home("data", path).absolute() for path in paths)

    @field_validator("tokenizer", mode="after")
    @classmethod
    def _absolute_path(cls, path: Path | None) -> Path | None:
        return path and _at_home("tokenizer", path).absolute()

    @field_validator("model", mode="after")
    @classmethod
    def _absolute_model(cls, model: str) -> str:
        is_file = model.endswith(".json")
        return str(_at_home("model", Path(model)).absolute()) if is_file else model

    @field_validator("out", mode="after")
    @classmethod
    def _out_at_home(cls, path: Path) -> Path:
        return _at_home("out", path)

    @model_validator(mode="after")
    def _check(self) -> Self:
        requirement = f"be divisible by accumulate = {self.accumulate}"
        is_whole = self.batch_size % self.accumulate == 0
        require(is_whole, "TrainSettings", "batch_size", requirement, self.batch_size)
        return self

    @property
    def microbatch_size(self) -> int:
        """Sequences per forward pass."""
        return self.batch_size // self.accumulate


def settings_from(values: Mapping[str, Any], source: str) -> TrainSettings:
    """Check settings given as JSON values; what is not named keeps its default.

    Raises:
        ConfigError: beginning with ``source``, one line for each setting that is unknown (with the
            nearest known name) or has a value that cannot work.
    """
    for name, value in values.items():
        text = json.dumps(value, default=str, ensure_ascii=False)
        # Python's stand-ins for bytes of the command line that are no UTF-8
        is_text = not any("\ud800" <= character <= "\udfff" for character in text)
        require(is_text, source, name, "be UTF-8 text", ascii(text), "Rename it, or write it anew.")
    return TrainSettings.from_json(json.dumps(values, default=str), source)


def resumed_settings(saved: Mapping[str, Any], stated: Mapping[str, Any]) -> TrainSettings:
    """The settings of a run that goes on: the saved ones, with those free to change as stated.

    Args:
        saved: all settings of the checkpoint, as JSON values.
        stated: what the caller asks for now, by name; settings not named stay as saved.

    Raises:
        ConfigError: naming a setting that would change what is learnt, with both values.
    """
    name = "resume"
    before = settings_from(saved, "checkpoint")
    after = settings_from({**saved, **stated}, name)
    for setting in stated:
        old, new = getattr(before, setting), getattr(after, setting)
        if old != new and not is_free(setting):
            remedy = "Leave it out, or start a new run with --out."
            requirement = f"stay as in the checkpoint ({str(old)!r})"
            raise ConfigError(instruction(name, setting, requirement, repr(str(new)), remedy))
    return after


def _at_home(setting: str, path: Path) -> Path:
    """The path with a leading ``~`` or ``~user`` replaced by that home."""
    try:
        return path.expanduser()
    except RuntimeError:
        remedy = "Write the path in full."
        message = instruction("TrainSettings", setting, "have a known home", path, remedy)
        raise ConfigError(message) from None


def group_of(name: str) -> str:
    """The group that a setting is listed under."""
    return str(_extra(name)["group"])


def is_free(name: str) -> bool:
    """Whether a setting may differ from the checkpoint's when a run is resumed."""
    return bool(_extra(name)["is_free"])


def _extra(name: str) -> dict[str, Any]:
    extra = TrainSettings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), f"{name=} was not declared by _setting"
    return extra
