"""Each rank of a group keeps some of a transformers model's experts, and tokens travel to them.

For models that are built without weights (on the meta device), so no rank ever holds all experts.
transformers' own expert parallelism loads a model whole and refuses pipelines.
"""

from typing import Any

from torch import Tensor, nn

from piper_kernels.dist.dispatcher import Dispatcher, ExpertParallel
from piper_kernels.huggingface.expert_counts import expert_modules
from piper_kernels.huggingface.expert_parallel import run_sliced


def keep_local_experts(model: nn.Module, ep: ExpertParallel) -> tuple[int, ...]:
    """Cut the tensors of all experts modules, in place, to this rank's experts.

    Every rank of the group calls it with the same model. From then on a module's forward takes
    logical expert ids of any rank's experts, as before.

    Args:
        model: on the meta device, or with weights that are meant to be dropped.
        ep: the group, its exchange and its placement, for all layers.

    Returns:
        Logical ids of this rank's experts, in the order of the tensors; empty without experts.

    Raises:
        ConfigError: more ranks than experts, or a placement that does not fit.
    """
    local: tuple[int, ...] = ()
    for _, module in expert_modules(model).values():
        dispatcher = Dispatcher(ep, module.num_experts)
        local = dispatcher.local_experts
        if dispatcher.exchange is not None:
            _keep(module, dispatcher)
    return local


def _keep(module: Any, dispatcher: Dispatcher) -> None:
    num_experts, local = module.num_experts, list(dispatcher.local_experts)
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.ndim > 0 and len(parameter) == num_experts:
            is_trained = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(parameter.detach()[local], is_trained))
    module.num_experts = len(local)
    module.dispatcher = dispatcher
    experts_forward = module.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_sliced(
            dispatcher, experts_forward, None, hidden_states, top_k_index, top_k_weights
        )

    module.forward = forward
