"""Expert weights of checkpoints: one tensor per expert and matrix <-> fused. Bit-equal both ways.

Nothing here unpickles: tensors come as a dict or from safetensors files.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from piper_kernels.huggingface.checkpoint_names import ExpertNames, find_names
from piper_kernels.huggingface.checkpoint_plan import (
    Copy,
    Plan,
    Slice,
    Stack,
    Step,
    TensorInfo,
    plan_fusion,
    plan_split,
)


def tensor_infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a state dict."""
    return {
        key: TensorInfo(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for key, tensor in tensors.items()
    }


def _stack(step: Stack, read: Callable[[str], Tensor]) -> Tensor:
    """Copy one matrix after another into the fused tensor, so that only one is held twice."""
    fused: Tensor | None = None
    for e, keys in enumerate(step.sources):
        row = 0
        for key in keys:
            matrix = read(key)
            rows, columns = matrix.shape
            if fused is None:
                fused = matrix.new_empty(len(step.sources), rows * len(keys), columns)
            fused[e, row : row + rows] = matrix
            row += rows
    assert fused is not None, f"{step=} has no sources"
    return fused


def make_tensor(step: Step, read: Callable[[str], Tensor]) -> Tensor:
    """Carry out one step of a plan; ``read(key)`` gives a source tensor."""
    match step:
        case Copy():
            return read(step.source)
        case Stack():
            return _stack(step, read)
        case Slice():
            return read(step.source)[step.expert, step.start : step.end].clone()


def _convert(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    with torch.no_grad():
        return {key: make_tensor(step, tensors.__getitem__) for key, step in plan.items()}


def fuse_experts(
    tensors: Mapping[str, Tensor],
    *,
    names: ExpertNames | None = None,
    num_experts: int | None = None,
) -> dict[str, Tensor]:
    """Turn a per-expert state dict into the fused one that transformers 5 keeps in memory.

    Args:
        tensors: the whole state dict. Expert keys are ``<prefix>.experts.<e>.<name>.weight``; the
            order of keys does not matter ("10" may come before "2"). Tensors outside experts, and
            layers that are fused already, go over as the same objects.
        names: the convention; default: Mixtral's (w1, w3, w2, and ``block_sparse_moe`` becomes
            ``mlp``) or Qwen's (gate_proj, up_proj, down_proj), whichever the keys use.
        num_experts: E; default: one more than the highest expert id. Give it where the last expert
            might be missing from every layer.

    Returns:
        A new dict with ``<prefix>.experts.gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.

    Raises:
        CheckpointError: naming the key that is missing, odd, or of a wrong shape or dtype.

    Example:
        >>> state = {f"mlp.experts.{e}.{part}.weight": torch.full(shape, float(e))
        ...          for e in range(2)
        ...          for part, shape in {"gate_proj": (3, 2), "up_proj": (3, 2),
        ...                              "down_proj": (2, 3)}.items()}
        >>> {key: tuple(t.shape) for key, t in fuse_experts(state).items()}
        {'mlp.experts.gate_up_proj': (2, 6, 2), 'mlp.experts.down_proj': (2, 2, 3)}
    """
    names = find_names(tensors) if names is None else names
    return _convert(tensors, plan_fusion(tensor_infos(tensors), names, num_experts))


def split_experts(tensors: Mapping[str, Tensor], *, names: ExpertNames) -> dict[str, Tensor]:
    """Turn a fused state dict into a per-expert one; the inverse of :func:`fuse_experts`.

    Args:
        tensors: the whole state dict, as ``model.state_dict()`` gives it.
        names: the convention to write, e.g. ``MIXTRAL_NAMES``.

    Returns:
        A new dict with contiguous ``<prefix>.experts.<e>.<name>.weight`` matrices.

    Raises:
        CheckpointError: naming the key that is missing, odd, or of a wrong shape.
    """
    return _convert(tensors, plan_split(tensor_infos(tensors), names))
