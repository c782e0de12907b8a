"""Which tensors of a checkpoint become which, decided from names, shapes and dtypes alone.

Per-expert: ``<prefix>.experts.<e>.<name>.weight`` for every expert e and each of its matrices.
Fused: ``<prefix>.experts.gate_up_proj [E, 2I, H]`` (ungated: ``up_proj [E, I, H]``) and
``<prefix>.experts.down_proj [E, H, I]``, what transformers 5 keeps in memory.
Letters: H hidden_size, I intermediate_size, E num_experts.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from piper_kernels.errors import CheckpointError, did_you_mean, instruction, require
from piper_kernels.huggingface.checkpoint_names import IN_EXPERTS, PER_EXPERT, ExpertNames


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """What a plan needs to know of a tensor.

    Attributes:
        shape: its sizes.
        dtype: its dtype's name, torch's (``bfloat16``) or safetensors' (``BF16``).
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the data; both kinds of names spell the bits of an element, bool has 8."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One tensor goes over as it is."""

    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One matrix (or gate above up) of every expert becomes one fused tensor."""

    sources: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Rows ``start:end`` of one expert of a fused tensor become one matrix."""

    source: str
    expert: int
    start: int
    end: int


Step = Copy | Stack | Slice
# Target key -> how to make it, in the order of the source keys.
Plan = dict[str, Step]


def target_bytes(step: Step, infos: Mapping[str, TensorInfo]) -> int:
    """Size of the tensor that a step makes."""
    match step:
        case Copy():
            return infos[step.source].num_bytes
        case Stack():
            return sum(infos[key].num_bytes for keys in step.sources for key in keys)
        case Slice():
            num_experts, num_rows, _ = infos[step.source].shape
            share = infos[step.source].num_bytes // (num_experts * num_rows)
            return share * (step.end - step.start)


_FUSED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias")


def _odd_key(function: str, key: str, names: ExpertNames) -> CheckpointError:
    part = key.split(".")[-2] if key.endswith(".weight") else key.rsplit(".", 1)[-1]
    wanted = f"be <expert id>.<name>.weight after 'experts.', names {', '.join(names.parts)}"
    return CheckpointError(
        instruction(function, "an expert key", wanted, repr(key), did_you_mean(part, names.parts))
    )


def _collect(
    infos: Mapping[str, TensorInfo], names: ExpertNames
) -> tuple[dict[str, dict[tuple[int, str], str]], dict[str, str]]:
    """Per-expert keys by prefix, (expert, part); and one fused key by prefix."""
    layers: dict[str, dict[tuple[int, str], str]] = {}
    fused: dict[str, str] = {}
    for key in infos:
        inside = IN_EXPERTS.fullmatch(key)
        if not inside:
            continue
        match = PER_EXPERT.fullmatch(inside["rest"])
        if match and match["part"] in names.parts:
            slot = int(match["expert"]), match["part"]
            layers.setdefault(inside["prefix"], {})[slot] = key
        elif inside["rest"] in (*_FUSED, "down_proj_bias"):
            fused.setdefault(inside["prefix"], key)
        else:
            raise _odd_key("fuse_experts", key, names)
    for prefix in layers.keys() & fused.keys():
        one = next(iter(layers[prefix].values()))
        wanted = f"be either per-expert or fused below {prefix!r}"
        raise CheckpointError(
            instruction("fuse_experts", "expert keys", wanted, f"{one!r} and {fused[prefix]!r}")
        )
    return layers, fused


def _check_complete(
    prefix: str, keys: Mapping[tuple[int, str], str], num_experts: int, names: ExpertNames
) -> None:
    wanted = {(e, part) for e in range(num_experts) for part in names.parts}
    missing = [f"{prefix}.{e}.{part}.weight" for e, part in sorted(wanted - keys.keys())]
    extra = [keys[slot] for slot in sorted(keys.keys() - wanted)]
    name = "fuse_experts"
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        wish = f"hold every matrix of {num_experts} experts"
        value = f"no key {missing[0]!r}{more}"
        remedy = "The checkpoint is incomplete: fetch the missing shard again."
        raise CheckpointError(instruction(name, "the checkpoint", wish, value, remedy))
    require(
        not extra,
        name,
        "the checkpoint",
        f"hold experts 0 to {num_experts - 1} only",
        f"the key {extra[0]!r}" if extra else "",
        error=CheckpointError,
    )


def _check_matrices(
    infos: Mapping[str, TensorInfo], keys: Mapping[tuple[int, str], str], names: ExpertNames
) -> None:
    """All experts of a layer agree in shape and dtype; up and down fit each other."""
    first = infos[keys[0, names.up]]
    for (_, part), key in sorted(keys.items()):
        info = infos[key]
        is_down = part == names.down
        wanted = first.shape[::-1] if is_down else first.shape
        role = f"{'(H, I)' if is_down else '(I, H)'} = {wanted}"
        require(
            len(info.shape) == 2 and info.shape == wanted,
            "fuse_experts",
            f"{key!r}",
            f"have shape {role} like the first expert's {names.up}",
            info.shape,
            error=CheckpointError,
        )
        require(
            info.dtype == first.dtype,
            "fuse_experts",
            f"{key!r}",
            f"have dtype {first.dtype} like the first expert's {names.up}",
            info.dtype,
            "Cast the checkpoint to one dtype first.",
            error=CheckpointError,
        )


def _first_source(step: Step) -> str:
    return step.sources[0][0] if isinstance(step, Stack) else step.source


def _add(function: str, plan: Plan, target: str, step: Step) -> None:
    """Two keys must not become one: renames map different names to the same."""
    if target in plan:
        sources = f"{_first_source(plan[target])!r} and {_first_source(step)!r}"
        wanted = f"hold one tensor for {target!r}"
        remedy = "They are named by two conventions: remove one of them."
        error = instruction(function, "the checkpoint", wanted, sources, remedy)
        raise CheckpointError(error)
    plan[target] = step


def plan_fusion(
    infos: Mapping[str, TensorInfo], names: ExpertNames, num_experts: int | None = None
) -> Plan:
    """How to make a fused checkpoint out of a per-expert one.

    Keys outside experts go over with the renames applied; layers that are fused already too.

    Args:
        infos: shape and dtype of every tensor.
        names: the convention of the per-expert keys.
        num_experts: E; default: one more than the highest expert id of all layers.

    Raises:
        CheckpointError: naming the key that is missing, odd, double, or of a wrong shape or dtype.
    """
    layers, _ = _collect(infos, names)
    highest = max((e for keys in layers.values() for e, _ in keys), default=-1)
    count = highest + 1 if num_experts is None else num_experts
    for prefix, keys in layers.items():
        _check_complete(prefix, keys, count, names)
        _check_matrices(infos, keys, names)
    firsts = (names.up,) if names.gate is None else (names.gate, names.up)
    plan: Plan = {}
    done: set[str] = set()
    for key in infos:
        inside = IN_EXPERTS.fullmatch(key)
        if not inside or inside["prefix"] not in layers:
            _add("fuse_experts", plan, names.to_fused(key), Copy(source=key))
        elif inside["prefix"] not in done:
            done.add(inside["prefix"])
            keys, target = layers[inside["prefix"]], names.to_fused(inside["prefix"])
            for part, sources in ((names.fused_first, firsts), ("down_proj", (names.down,))):
                experts = tuple(tuple(keys[e, s] for s in sources) for e in range(count))
                _add("fuse_experts", plan, f"{target}.{part}", Stack(sources=experts))
    return plan


def _check_pair(first_key: str, infos: Mapping[str, TensorInfo], names: ExpertNames) -> None:
    """A fused layer has both tensors, and their sizes fit each other."""
    down_key = first_key.removesuffix(names.fused_first) + "down_proj"
    name = "split_experts"
    require(
        down_key in infos,
        name,
        "the checkpoint",
        f"hold {down_key!r}",
        "no such key",
        error=CheckpointError,
    )
    first, down = infos[first_key].shape, infos[down_key].shape
    width = 1 if names.gate is None else 2
    fits = len(first) == len(down) == 3 and first == (down[0], width * down[2], down[1])
    require(
        fits,
        name,
        f"{first_key!r} and {down_key!r}",
        f"have shapes (E, {'2I' if width == 2 else 'I'}, H) and (E, H, I)",
        f"{first} and {down}",
        "Transposed or interleaved experts (gpt-oss) have no per-expert form.",
        error=CheckpointError,
    )


def plan_split(infos: Mapping[str, TensorInfo], names: ExpertNames) -> Plan:
    """How to make a per-expert checkpoint out of a fused one: the inverse of `plan_fusion`.

    Raises:
        CheckpointError: naming the key that is missing, odd, double or of a wrong shape.
    """
    plan: Plan = {}
    num_layers = 0
    for key, info in infos.items():
        inside = IN_EXPERTS.fullmatch(key)
        if not inside:
            _add("split_experts", plan, names.to_per_expert(key), Copy(source=key))
            continue
        prefix, rest = names.to_per_expert(inside["prefix"]), inside["rest"]
        if rest == names.fused_first:
            _check_pair(key, infos, names)
            num_layers += 1
        elif rest != "down_proj" or f"{inside['prefix']}.{names.fused_first}" not in infos:
            wanted = f"be {names.fused_first} or down_proj, both of them, after 'experts.'"
            raise CheckpointError(instruction("split_experts", "an expert key", wanted, repr(key)))
        rows = info.shape[1]
        parts = names.parts[:-1] if rest == names.fused_first else names.parts[-1:]
        size = rows // len(parts)
        for e in range(info.shape[0]):
            for i, part in enumerate(parts):
                piece = Slice(source=key, expert=e, start=i * size, end=(i + 1) * size)
                _add("split_experts", plan, f"{prefix}.{e}.{part}.weight", piece)
    wanted = f"hold keys <prefix>.experts.{names.fused_first}"
    require(
        num_layers > 0, "split_experts", "the checkpoint", wanted, "none", error=CheckpointError
    )
    return plan
