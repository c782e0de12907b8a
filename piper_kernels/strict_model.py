"""The base of every file that a person may write: frozen, units in keys, unknown keys refused.

pydantic checks; this room words what it finds as an instruction that names file, field, value and
remedy. It loads neither torch nor numpy.
"""

import hashlib
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

import pydantic

from piper_kernels.errors import ConfigError, PiperError, did_you_mean, instruction

if TYPE_CHECKING:
    # the fields of a model show to mypy through this name only
    from pydantic._internal._model_construction import ModelMetaclass
else:
    # pydantic exports no name for its metaclass
    ModelMetaclass = type(pydantic.BaseModel)

Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
NonNegativeFloat = Annotated[float, pydantic.Field(ge=0)]
NonNegativeInt = Annotated[int, pydantic.Field(ge=0)]
PositiveFloat = Annotated[float, pydantic.Field(gt=0)]
PositiveInt = Annotated[int, pydantic.Field(gt=0)]


def digest_of(*parts: bytes | str) -> str:
    """Hash parts, in order, to 32 hexadecimal digits; where one part ends matters.

    Example:
        >>> digest_of("ab", "c") == digest_of("a", "bc")
        False
    """
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:32]


def digest_to_int(digest: str) -> int:
    """The first 63 bits of a digest, so that it fits an int64 in a message header.

    Example:
        >>> digest_to_int("ffffffffffffffff0000000000000000") == 2**63 - 1
        True
    """
    return int(digest[:16], 16) >> 1


class _WordedMetaclass(ModelMetaclass):
    """Words the errors of ``Model(field=...)``; models nested in it are checked by pydantic."""

    def __call__(cls, *arguments: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*arguments, **fields)
        except pydantic.ValidationError as error:
            raise _worded(cls, cls.__name__, error) from None


class StrictModel(pydantic.BaseModel, metaclass=_WordedMetaclass):
    """A frozen record that is also a JSON file. Nothing is coerced, nothing unknown is accepted.

    In Python, sequences are given as tuples; in JSON, as lists.

    Raises:
        ConfigError: naming the field, the value and what to do, on construction or reading.

    Example:
        >>> class Disk(StrictModel):
        ...     size_bytes: PositiveInt
        >>> Disk.from_json('{"size_byte": 3}', source="disk.json")
        Traceback (most recent call last):
        ...
        piper_kernels.errors.ConfigError: disk.json: size_bytes must be given, got nothing. \
Add it: a Disk cannot be described without it.
        disk.json: size_byte must be a field of Disk, got 3. Did you mean 'size_bytes'?
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    @classmethod
    def from_json(cls, text: str, source: str = "") -> Self:
        """Read ``text``; ``source`` (a file's name) begins every error.

        Raises:
            ConfigError: not JSON, a key given twice, or a field missing, unknown or wrong.
        """
        source = source or cls.__name__
        try:
            json.loads(text, object_pairs_hook=lambda pairs: _refuse_twice(source, pairs))
            return cls.model_validate_json(text)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            remedy = f"Look at {where}: {error.msg}."
            raise ConfigError(
                instruction(source, "text", "be JSON", _short(text), remedy)
            ) from None
        except pydantic.ValidationError as error:
            raise _worded(cls, source, error) from None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a JSON file.

        Raises:
            ConfigError: the file cannot be read, or as :meth:`from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            sentence = instruction(
                cls.__name__, "path", "be a readable text file", path, f"{error}."
            )
            raise ConfigError(sentence) from None
        return cls.from_json(text, source=str(path))

    def to_json(self) -> str:
        """Indented JSON that :meth:`from_json` reads back to an equal model."""
        return self.model_dump_json(indent=2)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` and a final line break to ``path``."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def digest(self) -> str:
        """32 hexadecimal digits; equal for equal models, whatever the order of keys in a file."""
        plain = self.model_dump(mode="json")
        return digest_of(type(self).__name__, json.dumps(plain, sort_keys=True))

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed.

        Raises:
            ConfigError: as on construction.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**fields, **changes})


def _refuse_twice(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict, unless a key occurs in it twice."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            both = f"{_short(seen[key])} and {_short(value)}"
            raise ConfigError(instruction(source, key, "be given once", both, "Remove one."))
        seen[key] = value
    return seen


def _worded(model: type, source: str, error: pydantic.ValidationError) -> ConfigError:
    """The findings of pydantic, one instruction a line."""
    return ConfigError("\n".join(_sentences(model, source, error)))


def _sentences(model: type, source: str, error: pydantic.ValidationError) -> Iterator[str]:
    for finding in error.errors(include_url=False):
        path = finding["loc"]
        field = ".".join(map(str, path)) or "text"
        owner = _model_at(model, path[:-1])
        owner_name = getattr(owner, "__name__", "this place")
        cause = finding.get("ctx", {}).get("error")
        if isinstance(cause, PiperError):
            yield f"{source}: {'.'.join(map(str, path))}: {cause}" if path else f"{source}: {cause}"
        elif finding["type"] == "extra_forbidden":
            remedy = did_you_mean(str(path[-1]), getattr(owner, "model_fields", ()))
            value = _short(finding["input"])
            yield instruction(source, field, f"be a field of {owner_name}", value, remedy)
        elif finding["type"] == "missing":
            remedy = f"Add it: a {owner_name} cannot be described without it."
            yield instruction(source, field, "be given", "nothing", remedy)
        else:
            requirement = finding["msg"].removeprefix("Input should ")
            yield instruction(source, field, requirement, _short(finding["input"]))


def _model_at(annotation: Any, path: tuple[int | str, ...]) -> Any:
    """The model class that ``path`` (field names and indices) leads to, from a model or hint."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        present = [option for option in get_args(annotation) if option is not types.NoneType]
        return _model_at(present[0], path)
    if not path:
        return annotation
    head, *rest = path
    fields = getattr(annotation, "model_fields", None)
    if fields is not None:
        return _model_at(fields[str(head)].annotation, tuple(rest))
    # a tuple's elements come first among its arguments, a dict's values last
    arguments = get_args(annotation)
    element = arguments[-1] if get_origin(annotation) is dict else arguments[0]
    return _model_at(element, tuple(rest))


def _short(value: object) -> str:
    """``repr``, cut to what fits a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
