"""Flags and TOML for ``TrainSettings``, both made from the class: they cannot drift apart."""

import argparse
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from piper_kernels.errors import ConfigError, instruction, require
from piper_kernels.train.settings import TrainSettings, group_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, under the heading of its group.

    A flag that is not given leaves no attribute, so a TOML file or a checkpoint can supply it.
    """
    headings: dict[str, Any] = {}
    for name, field in TrainSettings.model_fields.items():
        group = group_of(name)
        if group not in headings:
            headings[group] = parser.add_argument_group(group)
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
        kind = _container(field)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif kind in {tuple, dict}:
            options |= {"nargs": "+", "metavar": "KEY=VALUE" if kind is dict else "PATH"}
        else:
            options["metavar"] = _metavar(field)
        headings[group].add_argument(_flag(name), dest=name, **options)


def stated_settings(arguments: argparse.Namespace, config: Path | None) -> dict[str, Any]:
    """What the user asked for, by name: the TOML file, then the flags on top.

    Raises:
        ConfigError: if the file cannot be read, or a KEY=VALUE flag has no ``=``.
    """
    given = vars(arguments)
    flags = {
        name: _value(field, given[name])
        for name, field in TrainSettings.model_fields.items()
        if name in given
    }
    return (_read_toml(config) if config else {}) | flags


def settings_toml(settings: TrainSettings) -> str:
    """The settings as TOML that ``--config`` takes, grouped, each with what it means.

    Settings that are ``None`` are written as comments, since TOML knows no null.
    """
    lines: list[str] = []
    group = ""
    for name, value in settings.model_dump(mode="json").items():
        if group_of(name) != group:
            group = group_of(name)
            lines += ["", f"# {group}"]
        text = TrainSettings.model_fields[name].description
        entry = f"# {name} =" if value is None else f"{name} = {_toml_value(value)}"
        lines.append(f"{entry}  # {text}")
    return "\n".join(lines[1:]) + "\n"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _container(field: FieldInfo) -> type:
    """bool, tuple or dict; str for a single word."""
    annotation = typing.get_origin(field.annotation) or field.annotation
    return annotation if annotation in {bool, tuple, dict} else str


def _metavar(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return "{" + ",".join(typing.get_args(annotation)) + "}"
    if isinstance(annotation, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    names = {int: "N", float: "X", Path: "PATH"}
    return names.get(annotation, "TEXT")


def _help(field: FieldInfo) -> str:
    default = field.default
    is_shown = not isinstance(default, bool) and default not in (None, (), {})
    shown = f" (default: {default})" if is_shown else ""
    return f"{field.description}{shown}".replace("%", "%%")


def _value(field: FieldInfo, words: Any) -> Any:
    """What a flag says, as a JSON value; a word that is no number stays a word, and is refused."""
    if _container(field) is dict:
        return dict(map(_key_and_value, words))
    if field.annotation not in (int, float):
        return words
    try:
        return field.annotation(words)
    except ValueError:
        return words


def _key_and_value(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    remedy = "Write e.g. --model-override num_experts=16."
    require(bool(key and equals), "settings", "model_override", "be KEY=VALUE", repr(word), remedy)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
    # besides bad TOML: no UTF-8, a number or a nesting beyond what Python reads
    except (ValueError, RecursionError) as error:
        reason = str(error)
    message = instruction("settings", "config", "be a readable TOML file", f"{path} ({reason})")
    raise ConfigError(message)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = (f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # a JSON string, number or boolean reads the same in TOML
    return json.dumps(value, ensure_ascii=False)
