"""The same conversion for folders of safetensors files, a few tensors in memory at a time.

The result is written beside its destination and renamed into place when it is complete and on disk,
so no half-written checkpoint ever carries the destination's name.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from piper_kernels.errors import CheckpointError, instruction, require
from piper_kernels.huggingface.checkpoint_names import ExpertNames, find_names
from piper_kernels.huggingface.checkpoint_plan import (
    Plan,
    TensorInfo,
    plan_fusion,
    plan_split,
    target_bytes,
)
from piper_kernels.huggingface.checkpoints import make_tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
# Weights in other formats, and indices of files that are not copied.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        wish = "be a readable JSON file"
        raise CheckpointError(instruction("convert_checkpoint", str(path), wish, error)) from error
    if not isinstance(content, dict):
        wish, given = "be a JSON object", type(content).__name__
        raise CheckpointError(instruction("convert_checkpoint", str(path), wish, given))
    return content


def _read_index(folder: Path) -> dict[str, str]:
    """Which file holds which key, as the folder's index says; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        wish, given = "hold a 'weight_map' of keys and files", repr(weight_map)
        raise CheckpointError(instruction("convert_checkpoint", str(path), wish, given))
    return weight_map


class _Source:
    """The tensors of a folder's safetensors files (its index's, if there is one), one at a time."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        index = _read_index(folder)
        files = sorted({folder / name for name in index.values()} or folder.glob("*.safetensors"))
        others = sorted(p.name for p in folder.glob("*") if p.suffix in {".bin", ".pt", ".pth"})
        require(
            bool(files),
            "convert_checkpoint",
            f"the folder {str(folder)!r}",
            "hold *.safetensors files",
            ", ".join(others) or "none",
            "Pickled weights are never read: save them as safetensors first." if others else "",
            error=CheckpointError,
        )
        self._file_of: dict[str, Any] = {}
        self.infos: dict[str, TensorInfo] = {}
        for path in files:
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                wish = "be a complete safetensors file"
                raise CheckpointError(
                    instruction("convert_checkpoint", str(path), wish, error)
                ) from error
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key in self._file_of:
                    wish = "occur in one file only"
                    raise CheckpointError(
                        instruction("convert_checkpoint", repr(key), wish, f"again {path.name}")
                    )
                self._file_of[key] = file
                piece = file.get_slice(key)
                shape = tuple(piece.get_shape())
                self.infos[key] = TensorInfo(shape=shape, dtype=piece.get_dtype())
        lost = [key for key in index if key not in self.infos]
        if lost:
            wish = f"hold {lost[0]!r}, as {INDEX} says"
            given = "no such key" + (f" and {len(lost) - 1} more missing" if lost[1:] else "")
            remedy = "The checkpoint is incomplete: fetch the file again."
            raise CheckpointError(
                instruction("convert_checkpoint", f"{index[lost[0]]!r}", wish, given, remedy)
            )
        self._last: tuple[str, Tensor] | None = None

    def read(self, key: str) -> Tensor:
        """One tensor. The last one is kept: the slices of a fused tensor follow one another."""
        if self._last is None or self._last[0] != key:
            self._last = key, self._file_of[key].get_tensor(key)
        return self._last[1]


def _expert_count(folder: Path) -> int | None:
    """E as the folder's ``config.json`` states it, if it does."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = _read_json(path)
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    counts = [config[name] for name in _EXPERT_COUNTS if type(config.get(name)) is int]
    return counts[0] if counts else None


def _shards(plan: Plan, infos: dict[str, TensorInfo], max_shard_bytes: int) -> list[list[str]]:
    """Target keys in order, cut where a file would pass ``max_shard_bytes``."""
    shards: list[list[str]] = [[]]
    used_bytes = 0
    for key, step in plan.items():
        size_bytes = target_bytes(step, infos)
        if shards[-1] and used_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            used_bytes = 0
        shards[-1].append(key)
        used_bytes += size_bytes
    return shards


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _written_aside(destination: Path) -> Iterator[Path]:
    """A fresh folder beside ``destination`` that takes its name if the block succeeds."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        aside.chmod(0o755)
        os.rename(aside, destination)
        _sync(destination.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(plan: Plan, source: _Source, folder: Path, shards: list[list[str]]) -> None:
    weight_map: dict[str, str] = {}
    for i, keys in enumerate(shards):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: make_tensor(plan[key], source.read) for key in keys}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    if len(shards) > 1:
        total_bytes = sum(target_bytes(step, source.infos) for step in plan.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _convert(
    source_folder: Path, destination: Path, max_shard_bytes: int, make_plan: Callable[..., Plan]
) -> None:
    require(
        not destination.exists(),
        "convert_checkpoint",
        "destination",
        "not exist yet",
        repr(str(destination)),
        "Remove it or choose another name.",
        error=CheckpointError,
    )
    with ExitStack() as opened, torch.no_grad():
        source = _Source(source_folder, opened)
        plan = make_plan(source.infos)
        shards = _shards(plan, source.infos, max_shard_bytes)
        try:
            with _written_aside(destination) as folder:
                for path in source_folder.iterdir():
                    if path.is_file() and not path.name.endswith(_NOT_COPIED):
                        shutil.copy2(path, folder / path.name)
                _write(plan, source, folder, shards)
        except (OSError, SafetensorError) as error:
            wish = "be writable with enough room"
            remedy = "Nothing was left behind."
            raise CheckpointError(
                instruction("convert_checkpoint", f"{str(destination)!r}", wish, error, remedy)
            ) from error
    logger.info("wrote %d tensors in %d files to %s", len(plan), len(shards), destination)


def fuse_folder(
    source: str | Path,
    destination: str | Path,
    *,
    names: ExpertNames | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write the fused form of a folder of per-expert safetensors files.

    Every other file of the folder (config, tokenizer) is copied. transformers 5 loads the result
    with ``from_pretrained`` and no conversion.

    Args:
        source: a folder as ``save_pretrained`` or the hub gives it. If its ``config.json`` states
            the number of experts, every layer must hold that many; if it has an index, the index's
            files are read, and each key that it lists must be there.
        destination: a folder that does not exist yet.
        names: the convention; default: found as in :func:`fuse_experts`.
        max_shard_bytes: a file is closed before it would pass this size.

    Raises:
        CheckpointError: a key is missing, odd, or of a wrong shape or dtype; a file is corrupt or
            pickled; the destination exists or cannot be written (it is then absent, not half done).
    """
    source = Path(source)

    def make_plan(infos: dict[str, TensorInfo]) -> Plan:
        return plan_fusion(infos, names or find_names(infos), _expert_count(source))

    _convert(source, Path(destination), max_shard_bytes, make_plan)


def split_folder(
    source: str | Path,
    destination: str | Path,
    *,
    names: ExpertNames,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write the per-expert form of a folder of fused safetensors files.

    Args:
        source: a folder with fused experts.
        destination: a folder that does not exist yet.
        names: the convention to write.
        max_shard_bytes: a file is closed before it would pass this size.

    Raises:
        CheckpointError: as for :func:`fuse_folder`.
    """

    def make_plan(infos: dict[str, TensorInfo]) -> Plan:
        return plan_split(infos, names)

    _convert(Path(source), Path(destination), max_shard_bytes, make_plan)
