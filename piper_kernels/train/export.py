"""From a checkpoint to a plain Hugging Face folder: what ``from_pretrained`` reads, to the bit."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from piper_kernels.train.checkpoint import (
    check_same,
    check_tensors,
    explained,
    ignore_single_process,
    remedy_for,
)
from piper_kernels.train.checkpoint_keys import model_tensors
from piper_kernels.train.manifest import check_files, read_manifest
from piper_kernels.train.model import model_digest


def export_checkpoint(checkpoint: Path, config: Any, folder: Path, *, experts: str) -> None:
    """Write the model of a checkpoint, whatever mesh it was trained on, into ``folder``.

    One process holds the whole model in CPU memory for it, without moments.

    Args:
        checkpoint: of a run in one process or on ranks.
        config: of the Hugging Face model that was trained.
        folder: for ``from_pretrained``; made if it is missing.
        experts: the experts implementation of the run, which is part of the model's digest.

    Raises:
        CheckpointError: files are missing or damaged, or the checkpoint is of another model.
    """
    from transformers import AutoModelForCausalLM

    remedy = remedy_for(checkpoint)
    manifest = read_manifest(checkpoint, remedy)
    check_files(checkpoint, manifest, remedy)
    model: Any = AutoModelForCausalLM.from_config(
        config, experts_implementation=experts, dtype=torch.float32
    )
    digest = model_digest(model)
    check_same("model", manifest.model_digest, digest, "Give the run's configuration.")
    with explained(None, remedy), warnings.catch_warnings():
        ignore_single_process()
        reader = HuggingFaceStorageReader(str(checkpoint))
        saved = reader.read_metadata().state_dict_metadata
        tensors = model_tensors(model)
        own = {key: saved[key] for key in saved if key in tensors}
        check_tensors(checkpoint, own, tensors, remedy)
        load(tensors, storage_reader=reader, no_dist=True)
    model.save_pretrained(folder)
