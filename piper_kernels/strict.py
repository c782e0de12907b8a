"""One strict base for every file and flag a user writes: unknown keys are refused, by name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from piper_kernels.errors import ConfigError, PiperError, did_you_mean, instruction


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Strict = TypeVar("Strict", bound=StrictModel)


def parse_strict(model: type[Strict], values: Mapping[str, Any], source: str) -> Strict:
    """Build ``model`` from ``values``, with every complaint worded as an instruction.

    Args:
        model: the strict model to build.
        values: its fields by name, e.g. a parsed TOML or JSON file.
        source: where the values come from, named first in an error: a command or a file.

    Raises:
        ConfigError: one line per complaint; an unknown key comes with the nearest known one.

    Example:
        >>> class Sizes(StrictModel):
        ...     top_k: int
        >>> parse_strict(Sizes, {"top_k": "2"}, "sizes.toml").top_k
        2
        >>> parse_strict(Sizes, {"top_k": 2, "topk": 2}, "sizes.toml")
        Traceback (most recent call last):
        ...
        piper_kernels.errors.ConfigError: sizes.toml: topk must be a known key, got 2. \
Did you mean 'top_k'?
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        complaints = [_complaint(model, item, source) for item in error.errors()]
    raise ConfigError("\n".join(complaints))


def _complaint(model: type[StrictModel], item: Any, source: str) -> str:
    inner = item.get("ctx", {}).get("error")
    if isinstance(inner, PiperError):
        return str(inner)
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        remedy = did_you_mean(str(item["loc"][-1]), _fields_at(model, item["loc"][:-1]))
        return instruction(source, path, "be a known key", repr(item["input"]), remedy)
    if item["type"] == "missing":
        return instruction(source, path, "be given", "nothing")
    requirement = item["msg"].removeprefix("Input should ").removeprefix("Value error, ")
    return instruction(source, path, requirement, repr(item["input"]))


def _fields_at(model: type[StrictModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the nested model that ``path`` leads to, through lists and dicts alike."""
    current: Any = model
    for part in path:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        current = _nested_model(field.annotation) if field else current
    return list(current.model_fields)


def _nested_model(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_nested_model(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model is not None), None)
