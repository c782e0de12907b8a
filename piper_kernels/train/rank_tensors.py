"""What one rank of a job holds, by checkpoint key, and which of it this rank writes.

Keys are those of a run in one process (``checkpoint_keys``): layers by their number in the model,
experts by their logical id. So any mesh reads what any other wrote.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from piper_kernels.pipeline.stage import Stage, base_model
from piper_kernels.train.checkpoint_keys import allocate_moments, model_tensors, moment_tensors
from piper_kernels.train.parallel_trainer import ParallelTrainer

_HEAD = "dense.lm_head.weight"


def rank_tensors(trainer: ParallelTrainer) -> dict[str, Tensor]:
    """Views of parameters, buffers and moments of all stages that are here."""
    found: dict[str, Tensor] = {}
    for stage in trainer.runtime.stages:
        found |= _stage_tensors(stage, trainer.optimizer)
    return found


def written_tensors(trainer: ParallelTrainer) -> dict[str, Tensor]:
    """Copies in CPU memory of what this rank writes: together the ranks write each key once."""
    where = trainer.runtime.mesh.coordinates
    writes_experts = where["dp"] == 0
    writes_dense = writes_experts and where["ep"] == 0
    found: dict[str, Tensor] = {}
    for stage in trainer.runtime.stages:
        embedding = _embedding_key(stage)
        for key, tensor in _stage_tensors(stage, trainer.optimizer).items():
            is_here = writes_experts if key.startswith("experts.") else writes_dense
            if is_here and not (_is_tied_copy(stage) and key.startswith(embedding)):
                found[key] = tensor.detach().to("cpu", copy=True).contiguous()
    found[rng_key(trainer.runtime.mesh.rank)] = torch.get_rng_state()
    return found


def make_room_for_moments(trainer: ParallelTrainer, saved_keys: set[str]) -> None:
    """Zero moments wherever the checkpoint has some, to load into."""
    for stage in trainer.runtime.stages:
        allocate_moments(stage.model, trainer.optimizer, set(_own_names(stage, saved_keys)))


def rng_key(rank: int) -> str:
    """Of a rank's generator; rank 0's is that of a run in one process.

    Example:
        >>> rng_key(0), rng_key(2)
        ('rng.cpu', 'rng.cpu.2')
    """
    return "rng.cpu" if rank == 0 else f"rng.cpu.{rank}"


def _stage_tensors(stage: Stage, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = model_tensors(stage.model) | moment_tensors(stage.model, optimizer)
    if not _is_tied_copy(stage):
        return tensors
    # the copy of a tied embedding goes by the embedding's name
    embedding = _embedding_key(stage)
    return {
        embedding + key.removeprefix(_HEAD) if key.startswith(_HEAD) else key: tensor
        for key, tensor in tensors.items()
    }


def _own_names(stage: Stage, keys: set[str]) -> Iterator[str]:
    """Keys as the stage's model names them."""
    embedding = _embedding_key(stage)
    for key in keys:
        is_head = _is_tied_copy(stage) and key.startswith(embedding)
        yield _HEAD + key.removeprefix(embedding) if is_head else key


def _is_tied_copy(stage: Stage) -> bool:
    return stage.tied_weight is not None and not stage.place.is_first


def _embedding_key(stage: Stage) -> str:
    model = stage.model
    name = next(name for name, module in model.named_modules() if module is base_model(model))
    return f"dense.{name}.embed_tokens.weight"
