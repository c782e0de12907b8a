"""One run on several ranks, from plan and settings to the last checkpoint."""

import resource
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_kernels.errors import ConfigError, PlanError, require
from piper_kernels.huggingface.balancing import CORRECTION_BIAS
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.pipeline.launch import build_runtime, check_executable
from piper_kernels.pipeline.model_config import load_model
from piper_kernels.pipeline.plan import Plan
from piper_kernels.train.corpus import Corpus, load_corpus
from piper_kernels.train.evaluate import HeldOut, held_out_windows
from piper_kernels.train.metrics import MetricsFile, StepRecord
from piper_kernels.train.model import (
    build_config,
    check_experts_implementation,
    choose_device,
    model_digest,
)
from piper_kernels.train.optimizer import build_optimizer
from piper_kernels.train.parallel_checkpoint import CheckpointWriter, load_parallel_checkpoint
from piper_kernels.train.parallel_trainer import ParallelTrainer, loss_rules
from piper_kernels.train.progress import Progress
from piper_kernels.train.rank_metrics import RankMetricsFile, RankRecord
from piper_kernels.train.ranks import local_device, together
from piper_kernels.train.sampler import WindowSampler
from piper_kernels.train.settings import TrainSettings
from piper_kernels.train.stopping import StopRequest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ParallelRun:
    """Everything that a rank works with.

    Attributes:
        plan: that is followed.
        settings: what to do.
        corpus: the text.
        held_out: its held-out part, ready to evaluate.
        trainer: this rank's stages and where they stand.
        model_digest: hash of the whole model's configuration.
        layers: numbers of the layers that have experts, of the whole model.
    """

    plan: Plan
    settings: TrainSettings
    corpus: Corpus
    held_out: HeldOut
    trainer: ParallelTrainer
    model_digest: str
    layers: list[int]

    @property
    def rank(self) -> int:
        """This rank."""
        return self.trainer.runtime.mesh.rank


def check_plan(plan: Plan, config: Any, world_size: int) -> None:
    """Raise ``PlanError`` unless the plan is for this model and these ranks.

    Pure. The model's digest is compared if its family can be described for planning.

    Args:
        plan: to be followed.
        config: of the Hugging Face model.
        world_size: ranks that were started.
    """
    num_experts = 0
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        num_experts = num_experts or int(getattr(config, name, None) or 0)
    num_layers = config.num_hidden_layers
    numbers = {"num_layers": num_layers, "num_experts": num_experts}
    check_executable(plan, world_size=world_size, **numbers)
    try:
        digest = load_model(config.to_dict()).digest()
    except ConfigError:
        # the planner cannot describe this family, so the plan was written by hand
        return
    plan.check_model(digest, num_layers, num_experts)


def build_parallel_run(plan: Plan, settings: TrainSettings, checkpoint: Path | None) -> ParallelRun:
    """Read the text, build this rank's stages, and go to where ``checkpoint`` stands.

    Every rank calls it inside ``joined_ranks``; what is wrong on one rank is raised on all.

    Raises:
        PiperError: if plan, text, model or checkpoint cannot be used.
    """
    if settings.threads > 0:
        torch.set_num_threads(settings.threads)
    world_size = dist.get_world_size()

    def prepare() -> tuple[Corpus, Any, torch.device]:
        check_experts_implementation(settings.experts)
        corpus = load_corpus(settings)
        config = build_config(settings, corpus.tokens.vocab_size)
        check_plan(plan, config, world_size)
        return corpus, config, choose_device(local_device(settings.device))

    corpus, config, device = together("start", prepare)
    whole = _on_meta(config, settings.experts)
    layers = list(expert_modules(whole))
    require(bool(layers), "train", "model", "have experts", settings.model, error=PlanError)
    names = [name for name, _ in (*whole.named_buffers(), *whole.named_parameters())]
    has_bias = any(name.rpartition(".")[2] == CORRECTION_BIAS for name in names)
    # routers with noise: each rank draws its own
    torch.manual_seed(settings.seed + dist.get_rank())
    runtime = build_runtime(
        plan,
        config,
        seed=settings.seed,
        rules=loss_rules(settings, has_correction_bias=has_bias),
        experts=settings.experts,
        device=device,
        timeout_s=settings.timeout_s,
    )
    trainer = ParallelTrainer(
        runtime=runtime,
        optimizer=build_optimizer(runtime.modules, settings, plan.optimizer.kind),
        sampler=WindowSampler(
            corpus.train, sequence_length=settings.sequence_length, seed=settings.seed
        ),
        settings=settings,
        tokens_per_byte=corpus.tokens_per_byte,
    )
    digest = model_digest(whole)
    if checkpoint is not None:
        identity = {"text_sha256": corpus.sha256, "model_digest": digest}
        load_parallel_checkpoint(checkpoint, trainer, **identity)
    return ParallelRun(
        plan=plan,
        settings=settings,
        corpus=corpus,
        held_out=held_out_windows(corpus, settings.sequence_length),
        trainer=trainer,
        model_digest=digest,
        layers=layers,
    )


def train_parallel(
    run: ParallelRun, out: Path, progress: Progress | None, stop: StopRequest
) -> tuple[bool, list[RankRecord]]:
    """Make the steps that are left, with records, evaluations and checkpoints as they are due.

    Args:
        run: of this rank.
        out: folder of the run, shared by all ranks.
        progress: told of every step; on rank 0.
        stop: a signal to any rank stops all of them after the step.

    Returns:
        Whether all steps are done, and what this rank recorded.

    Raises:
        TrainingError: loss or gradient is not finite; the last checkpoint stays.
        CheckpointError: a checkpoint cannot be written; the last one stays.
        TransferError: a peer died, hangs or disagrees.
    """
    trainer, settings = run.trainer, run.settings
    metrics = MetricsFile(out / "metrics.jsonl", trainer.step) if run.rank == 0 else None
    path = out / "ranks" / f"rank-{run.rank:05d}.jsonl"
    own = RankMetricsFile(path, trainer.step)
    writer = CheckpointWriter(
        out / "checkpoints",
        rank=run.rank,
        num_ranks=run.plan.world_size,
        text_sha256=run.corpus.sha256,
        model_digest=run.model_digest,
        keep=settings.keep_checkpoints,
        timeout_s=settings.timeout_s,
    )
    records: list[RankRecord] = []
    try:
        # nobody writes before rank 0 has removed what a killed run left half-written
        dist.barrier()
        writer.save(trainer)
        is_stopped = False
        while trainer.step < settings.steps and not is_stopped:
            record = _step(run)
            records.append(_rank_record(run, record))
            own.append(records[-1])
            if metrics is not None:
                metrics.append(record)
            if progress is not None:
                progress.update(record)
            is_stopped = _any_rank(run, stop.is_made)
            if trainer.step % settings.checkpoint_every == 0 or is_stopped:
                if metrics is not None:
                    metrics.sync()
                writer.save(trainer)
        if metrics is not None:
            metrics.sync()
        writer.save(trainer)
        together("write the checkpoint", writer.wait)
    finally:
        writer.close()
        own.close()
        if metrics is not None:
            metrics.close()
    return trainer.step == settings.steps and not is_stopped, records


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: of CUDA's allocator, or of the whole process on a CPU.

    Example:
        >>> peak_bytes(torch.device("cpu")) > 1 << 20
        True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _step(run: ParallelRun) -> StepRecord:
    settings, trainer = run.settings, run.trainer
    record = trainer.train_step()
    if record.step % settings.evaluate_every == 0 or record.step == settings.steps:
        record = replace(record, held_out_loss=trainer.held_out_loss(run.held_out))
    return record


def _rank_record(run: ParallelRun, record: StepRecord) -> RankRecord:
    runtime = run.trainer.runtime
    return RankRecord(
        step=record.step,
        rank=run.rank,
        stages=tuple(stage.place.index for stage in runtime.stages),
        step_s=record.step_s,
        peak_bytes=peak_bytes(runtime.device),
    )


def _any_rank(run: ParallelRun, is_made: bool) -> bool:
    flag = torch.tensor([int(is_made)], device=run.trainer.runtime.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _on_meta(config: Any, experts: str) -> Any:
    """The whole model without memory: its names and shapes."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, experts_implementation=experts, dtype=torch.float32
        )
