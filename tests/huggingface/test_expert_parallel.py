"""``ep_implementation="piper"``: transformers' layouts on real ranks equal one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import piper_kernels.huggingface as phf
from piper_kernels.dist import clip_grad_norm_
from piper_kernels.dist.topology_presets import frontier
from piper_kernels.errors import ConfigError
from piper_kernels.testing import run_ranks
from piper_kernels.testing.tiny_models import tiny_model

pytest.importorskip("transformers.distributed.expert_parallel")

# ep, tp, fsdp
LAYOUTS = [(4, 1, 4), (4, 2, 2)]
MORE_LAYOUTS = [(2, 1, 4), (4, 4, 1)]


# In fp64 and fp16 torch (2.13) divides by FSDP's factor twice where nothing is reduced, which is
# where each expert lives whole on one rank; transformers' own expert parallelism shows it, too.
def dtype_of(ep: int, tp: int, fsdp: int) -> torch.dtype:
    return torch.float32 if ep == fsdp * tp else torch.float64


def batch_of(index: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(index))


def whole_gradients(
    folder: str, num_batches: int, dtype: torch.dtype
) -> tuple[float, dict[str, Any]]:
    """The mean loss of all batches in one process, and its gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    total = 0.0
    for index in range(num_batches):
        ids = batch_of(index)
        loss = model(input_ids=ids, labels=ids).loss / num_batches
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def train_layouts(folder: str, layouts: list[tuple[int, int, int]]) -> list[tuple[str, float]]:
    """Differences of loss, gradients and norm to one process, in units of what is allowed."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    phf.register_expert_parallel(frontier(1).lay_out((2, 2)), "halo_dedup", name="piper_dedup")
    found = []
    for index, (ep, tp, fsdp) in enumerate(layouts):
        name = ["piper", "piper_dedup"][index % 2]
        dtype = dtype_of(ep, tp, fsdp)
        allowed = 1e-9 if dtype == torch.float64 else 1e-6
        config = DistributedConfig(ep_size=ep, tp_size=tp, fsdp_size=fsdp, ep_implementation=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, distributed_config=config, experts_implementation="piper"
        )
        model.train()
        ids = batch_of(dist.get_rank() // tp)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        mean = loss.detach().clone()
        mean = mean.full_tensor() if isinstance(mean, DTensor) else mean
        dist.all_reduce(mean)
        want, grads = whole_gradients(folder, fsdp, dtype)
        # transformers computes losses in fp32 whatever the dtype of the model
        found.append((f"{name} loss", abs(mean.item() / dist.get_world_size() - want) / 1e-6))
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            error = (whole - grads[key]).abs().max().item()
            found.append((f"{name} {key}", error / allowed))
        norm = torch.cat([grad.reshape(-1) for grad in grads.values()]).double().norm().item()
        error = abs(clip_grad_norm_(model, 1.0).item() - norm)
        found.append((f"{name} norm", error / (norm * allowed)))
    return found


def check_layouts(folder: Path, layouts: list[tuple[int, int, int]]) -> None:
    tiny_model("olmoe", dtype=torch.float64, router_aux_loss_coef=0.0).save_pretrained(folder)
    for found in run_ranks(train_layouts, 4, str(folder), layouts, timeout_s=200.0):
        assert len(found) > 20
        assert {name: error for name, error in found if not error < 1.0} == {}


# transformers' modules under tensor parallelism and FSDP, not ours
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_expert_parallel_layouts_equal_one_process(tmp_path: Path) -> None:
    check_layouts(tmp_path, LAYOUTS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_expert_parallel_more_layouts_equal_one_process(tmp_path: Path) -> None:
    check_layouts(tmp_path, MORE_LAYOUTS)


def test_register_expert_parallel_is_in_the_registry() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    assert "piper" in EPImplementationInterface()
    assert phf.register_expert_parallel(name="piper_again") is True
    assert "piper_again" in EPImplementationInterface()
    with pytest.raises(ConfigError, match="exchange must be one of auto, flat, halo, halo_dedup"):
        phf.register_expert_parallel(exchange="halos")  # type: ignore[arg-type]
