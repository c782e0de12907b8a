"""How a model and its optimizer are named in a checkpoint: one key per logical expert.

::

    experts.<layer>.<logical id>.<parameter>            one expert's slice, e.g. gate_up_proj
    experts.<layer>.<logical id>.<parameter>.exp_avg    its first moment; also exp_avg_sq, step
    dense.<parameter or buffer>                         everything else, by its name in the model
    dense.<parameter>.exp_avg                           its moments likewise
    rng.cpu, rng.cuda                                   torch's generators

Experts can then be read by any number of ranks in any placement: logical ids never change.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_kernels.huggingface.expert_counts import expert_modules, local_expert_ids

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
# of SGD
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedParameter:
    """One parameter and the keys it is saved under.

    Attributes:
        parameter: the parameter itself.
        keys: one key for a dense parameter; one per expert that is here, in the tensor's order.
        is_expert: whether ``keys`` name slices along the first dim.
    """

    parameter: nn.Parameter
    keys: tuple[str, ...]
    is_expert: bool

    def slices(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """``(key, view)`` pairs of a tensor shaped like the parameter, or of a scalar for all."""
        is_shared = tensor.ndim == 0
        for index, key in enumerate(self.keys):
            yield key, tensor[index] if self.is_expert and not is_shared else tensor


def keyed_parameters(model: nn.Module) -> list[KeyedParameter]:
    """Every parameter once (tied ones by their first name), with its keys."""
    prefix_of = {
        f"{module_name}.{name}": (f"experts.{layer}", name, local_expert_ids(module))
        for layer, (module_name, module) in expert_modules(model).items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 0 and len(parameter) == module.num_experts
    }
    keyed = []
    for name, parameter in model.named_parameters():
        keys: tuple[str, ...] = (f"dense.{name}",)
        if name in prefix_of:
            prefix, own_name, experts = prefix_of[name]
            keys = tuple(f"{prefix}.{expert}.{own_name}" for expert in experts)
        keyed.append(KeyedParameter(parameter=parameter, keys=keys, is_expert=name in prefix_of))
    return keyed


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Views of all parameters and saved buffers by key: loading into them loads the model."""
    tensors: dict[str, Tensor] = {}
    for keyed in keyed_parameters(model):
        tensors.update(keyed.slices(keyed.parameter.detach()))
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            tensors[f"dense.{name}"] = tensor
    return tensors


def moment_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by key, views where it is per element; none before the first step."""
    tensors: dict[str, Tensor] = {}
    for keyed in keyed_parameters(model):
        state = optimizer.state.get(keyed.parameter, {})
        for moment, tensor in state.items():
            if not isinstance(tensor, Tensor):
                # SGD without momentum keeps a None
                continue
            tensors.update((f"{key}.{moment}", part) for key, part in keyed.slices(tensor))
    return tensors


def allocate_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved_keys: set[str]
) -> None:
    """Make zero moments for every parameter whose moments are among ``saved_keys``, to load into.

    A parameter that never got a gradient has no moments, in memory or on disk.
    """
    for keyed in keyed_parameters(model):
        parameter = keyed.parameter
        if f"{keyed.keys[0]}.step" in saved_keys:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        elif f"{keyed.keys[0]}.{MOMENTUM}" in saved_keys:
            optimizer.state[parameter] = {MOMENTUM: torch.zeros_like(parameter)}
