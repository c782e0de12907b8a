"""A PiperMoE made of the parts of a transformers MoE block, under the block's own names."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.balance import updated_correction_bias
from piper_kernels.config import MoEConfig
from piper_kernels.errors import ConfigError, instruction
from piper_kernels.functional.explain import Explanation
from piper_kernels.huggingface.experts_function import explain_experts_function
from piper_kernels.huggingface.families import BlockFamily, read_config, without_adapters
from piper_kernels.huggingface.registry import EXPERTS_IMPLEMENTATION
from piper_kernels.moe import PiperMoE
from piper_kernels.routing import Routing, apply_jitter, widen


class BlockRouter:
    """A block's own router, called as :class:`piper_kernels.modules.router.Router` is.

    The module itself makes the choice, so a model in bf16 routes as it was trained to, and
    transformers' hooks on it record ``router_logits``.

    Args:
        module: called ``(x [T, H]) -> (logits [T, E], gates [T, K], expert_ids [T, K])``.
        config: of the layer.
    """

    def __init__(self, module: nn.Module, config: MoEConfig) -> None:
        self.module, self.config = module, config

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Routing:
        """Route the tokens; those that ``mask`` rules out go nowhere."""
        is_real = None if mask is None else mask != 0
        if is_real is not None:
            x = torch.where(is_real[:, None], x, 0.0)
        if self.module.training and self.config.router.jitter > 0:
            x = apply_jitter(x, self.config.router.jitter)
        logits, gates, expert_ids = self.module(x)
        gates = widen(gates)
        if is_real is not None:
            expert_ids = expert_ids.masked_fill(~is_real[:, None], self.config.num_experts)
            gates = torch.where(is_real[:, None], gates, 0.0)
        return Routing(
            expert_ids=expert_ids,
            gates=gates,
            logits=widen(logits),
            mask=is_real,
            kind=self.config.router.kind,
        )

    @property
    def weight(self) -> Tensor:
        """``[E, H]``."""
        return without_adapters(self.module).weight

    @property
    def bias(self) -> Tensor | None:
        """``[E]``, or ``None``."""
        return getattr(without_adapters(self.module), "bias", None)

    @property
    def correction_bias(self) -> Tensor | None:
        """``[E]``, or ``None``; transformers calls it ``e_score_correction_bias``."""
        return getattr(without_adapters(self.module), "e_score_correction_bias", None)

    @torch.no_grad()
    def update_correction_bias(self, expert_counts: Tensor, speed: float = 1e-3) -> None:
        """As :meth:`piper_kernels.modules.router.Router.update_correction_bias`."""
        bias = self.correction_bias
        if bias is None:
            name, remedy = "BlockRouter.update_correction_bias", "Train with a balance loss."
            raise ConfigError(instruction(name, "correction_bias", "exist", None, remedy))
        bias.copy_(updated_correction_bias(bias, expert_counts, speed))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The router's parameters."""
        return self.module.parameters()


class GatedShared:
    """``sigmoid(gate(x)) * mlp(x)``."""

    def __init__(self, mlp: nn.Module, gate: nn.Module) -> None:
        self.mlp, self.gate = mlp, gate

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``."""
        return torch.sigmoid(self.gate(x)) * self.mlp(x)


class HuggingFaceMoE(PiperMoE):
    """A :class:`PiperMoE` in the place of a transformers block. Made by `replace_moe_blocks`.

    Its children are the block's own modules under the block's own names, so parameters are the same
    objects, and ``state_dict``, ``named_parameters``, adapters, sharding plans and transformers'
    output recording see what they saw before. ``router``, ``experts`` and ``shared_experts`` give
    them under PiperMoE's names.

    The experts run ``"piper"`` whatever ``set_experts_implementation`` says. Router jitter
    (Mixtral) acts on the router's input only; transformers' block changes its experts' input too.

    Args:
        block: the block.
        family: its entry in the table of families.
    """

    def __init__(self, block: nn.Module, family: BlockFamily) -> None:
        nn.Module.__init__(self)
        self.config = read_config(block, family)
        self.family = family
        # in a tuple, so that it is not registered as a child
        self._original = (block,)
        self._modules.update(block._modules)
        # hooks stay in force on both sides, and their handles can still remove them
        self.__dict__.update({k: v for k, v in vars(block).items() if "_hook" in k})
        self.train(block.training)
        experts = without_adapters(self.experts)
        self._experts_config = experts.config
        experts.config = copy.copy(experts.config)
        experts.config._experts_implementation_internal = EXPERTS_IMPLEMENTATION

    @property
    def router(self) -> BlockRouter:  # type: ignore[override]
        """The block's router."""
        return BlockRouter(self._child(self.family.router), self.config)

    @property
    def shared_experts(self) -> Callable[[Tensor], Tensor] | None:  # type: ignore[override]
        """The block's shared experts, weighed per token if the block does that."""
        if self.family.shared_experts is None:
            return None
        mlp = self._child(self.family.shared_experts)
        if self.family.shared_gate is None:
            return mlp
        return GatedShared(mlp, self._child(self.family.shared_gate))

    def _child(self, name: str) -> nn.Module:
        """A child by transformers' name, which a property of ours may hide."""
        child = self._modules[name]
        assert child is not None, f"{name=} was removed from the block"
        return child

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        routing: Routing | None = None,
        return_stats: bool = False,
    ) -> Any:
        """As :meth:`PiperMoE.forward`; without ``return_stats`` in the form the block returns."""
        if return_stats:
            return super().forward(x, mask=mask, routing=routing, return_stats=True)
        if not self.family.returns_scores:
            return super().forward(x, mask=mask, routing=routing)
        chosen = self.route(x, mask=mask) if routing is None else routing
        return super().forward(x, routing=chosen), chosen.gates.to(x.dtype)

    def explain(self, x: Tensor | int) -> Explanation:
        """As :meth:`PiperMoE.explain`; an adapter on the experts is not counted.

        Args:
            x: as in ``forward``, or a number of tokens.
        """
        experts = without_adapters(self.experts)
        if isinstance(x, int):
            # one row seen T times: a question costs no memory
            tokens = experts.down_proj.new_empty(1, self.config.hidden_size).expand(x, -1)
        else:
            tokens = x.reshape(-1, x.shape[-1])
        shape = tokens.shape[0], self.config.top_k
        expert_ids = tokens.new_empty(1, 1, dtype=torch.int64).expand(shape)
        gates = tokens.new_empty(1, 1, dtype=torch.float32).expand(shape)
        return explain_experts_function(experts, tokens, expert_ids, gates)

    def reset_parameters(self) -> None:
        """Refused: transformers initialises its modules itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            instruction(
                "HuggingFaceMoE.reset_parameters",
                "the model",
                "be initialised by transformers",
                "a call",
                "Use model.init_weights(), or from_pretrained.",
            )
        )

    def restore(self) -> nn.Module:
        """Give the block back, with the children that this module has now."""
        (block,) = self._original
        block._modules.update(self._modules)
        block.train(self.training)
        without_adapters(self.experts).config = self._experts_config
        return block
