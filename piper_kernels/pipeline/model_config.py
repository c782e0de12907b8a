"""A model's description from a config: a file, a folder, a dict, or the name of a known model.

Pure: no torch, no process group, no transformers, nothing is downloaded.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from piper_kernels.errors import ConfigError, did_you_mean, instruction
from piper_kernels.pipeline.config_reader import ConfigReader
from piper_kernels.pipeline.model_by_hand import HandModel
from piper_kernels.pipeline.model_description import ModelDescription
from piper_kernels.pipeline.model_families import FAMILIES

NAMED_MODELS = Path(__file__).parent / "named_models"
BY_HAND = "piper"


def named_models() -> tuple[str, ...]:
    """Names of the models whose configs are shipped, each with its source.

    Example:
        >>> "mixtral-8x7b" in named_models()
        True
    """
    return tuple(sorted(path.stem for path in NAMED_MODELS.glob("*.json")))


def load_model(source: str | Path | Mapping[str, Any]) -> ModelDescription:
    """Describe a model.

    Args:
        source: the name of a shipped model, the path of a ``config.json``, of a folder with one, or
            the config itself.

    Returns:
        Layers, sizes and exact parameter counts.

    Raises:
        ConfigError: there is no such model or file, the architecture is unknown, or a key is
            missing or wrong.

    Example:
        >>> model = load_model("mixtral-8x7b")
        >>> f"{model.num_parameters / 1e9:.1f} B, {model.num_active_parameters / 1e9:.1f} B active"
        '46.7 B, 12.9 B active'
    """
    if isinstance(source, Mapping):
        return _describe(source, "config", "model")
    name = str(source)
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    elif isinstance(source, str) and name in named_models():
        path = NAMED_MODELS / f"{name}.json"
    if not path.is_file():
        remedy = f"{did_you_mean(name, named_models())} Or give the path of a config.json."
        requirement = "be a known model, a file or a folder"
        raise ConfigError(instruction("load_model", "source", requirement, repr(name), remedy))
    title = path.parent.name if path.name == "config.json" else path.stem
    return _describe(_read(path), str(path), title or "model")


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sentence = instruction(str(path), "text", "be readable JSON", "a broken file", f"{error}.")
        raise ConfigError(sentence) from None
    if not isinstance(config, dict):
        given = type(config).__name__
        raise ConfigError(instruction(str(path), "text", "be a JSON object", given))
    return config


def _describe(config: Mapping[str, Any], source: str, name: str) -> ModelDescription:
    """The description that a config's ``model_type`` leads to."""
    family = config.get("model_type")
    if family == BY_HAND:
        return HandModel.from_json(json.dumps(dict(config)), source=source).describe(name)
    build = FAMILIES.get(str(family))
    if build is None:
        known = (*FAMILIES, BY_HAND)
        nearest = did_you_mean(str(family), known)
        remedy = f"{nearest} Or describe it by hand, with model_type 'piper'."
        requirement = f"be one of {', '.join(known)}"
        raise ConfigError(instruction(source, "model_type", requirement, repr(family), remedy))
    model = build(ConfigReader(config, source))
    return replace(model, name=name, source=str(config.get("source", source)))
