"""PiperMoE: one Mixture-of-Experts layer.

Letters: T num_tokens, H hidden_size, I intermediate_size, E num_experts, K top_k.
"""

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from piper_kernels.choice import has_constant_gates
from piper_kernels.config import (
    SWIGLU,
    Activation,
    Backend,
    MoEConfig,
    RouterConfig,
    Save,
    SharedExpertsConfig,
    WeightLayout,
)
from piper_kernels.errors import ConfigError, instruction
from piper_kernels.functional.explain import Explanation
from piper_kernels.modules.experts import Experts
from piper_kernels.modules.inputs import adopt_routing, flatten_tokens
from piper_kernels.modules.router import Router
from piper_kernels.modules.shared_experts import SharedExperts
from piper_kernels.modules.stats import MoEStats, collect_stats
from piper_kernels.routing import Routing, apply_capacity

if TYPE_CHECKING:
    from piper_kernels.dist.dispatcher import Dispatcher, ExpertParallel


class PiperMoE(nn.Module):
    """``y = sum_k gates[k] * expert_k(x) (+ shared_experts(x))``, experts chosen by a router.

    Parameters: ``router.weight [E, H]`` (and ``router.bias``, buffer ``router.correction_bias``),
    ``experts.gate_up_proj [E, 2I, H]`` (``[E, I, H]`` ungated), ``experts.down_proj [E, H, I]``, or
    as ``layout`` says (and ``experts.gate_up_proj_bias``, ``experts.down_proj_bias``),
    ``shared_experts.{gate_proj,up_proj,down_proj,gate}.weight``. Weights start as those of
    ``nn.Linear`` do, each expert's by its own fan-in; biases start at 0.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        top_k: K.
        router: how experts are chosen; default: softmax over E, then the K best, normalised.
        activation: what happens between an expert's projections.
        layout: how the expert weights are stored; default: Hugging Face's halves.
        has_expert_bias: both projections have a bias.
        shared_experts: an MLP that every token passes as well.
        capacity_factor: ``None`` drops nothing. Else an expert takes at most
            ``ceil(capacity_factor * T * K / E)`` slots; dropped slots contribute 0, the token's
            other gates stay as they are.
        save: what the experts keep for the backward: ``preact``, or ``x`` only (less memory, one
            more GEMM).
        backend: ``auto``, ``triton``, ``cpu`` or ``reference``.
        ep: expert parallelism: this rank holds its L experts only, ``experts.gate_up_proj [L, 2I,
            H]`` and so on, in the order of ``dispatcher.local_experts``; everything else is on
            every rank, and all ids and counts stay those of the whole layer.
        device: of new parameters.
        dtype: of new parameters; the correction bias is at least fp32.

    Raises:
        ConfigError: a size or setting that cannot work, e.g. K > E.

    Warns:
        UserWarning: K = 1 with normalised gates: the gate is always 1 and the router learns nothing
            from the output.

    Example:
        >>> moe = PiperMoE(hidden_size=16, intermediate_size=24, num_experts=8, top_k=2)
        >>> y, stats = moe(torch.randn(2, 5, 16), return_stats=True)
        >>> y.shape, stats.routing.expert_ids.shape, int(stats.expert_counts.sum())
        (torch.Size([2, 5, 16]), torch.Size([10, 2]), 20)
    """

    # what brings tokens to the experts of other ranks
    dispatcher: "Dispatcher | None" = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        router: RouterConfig | None = None,
        activation: Activation = SWIGLU,
        layout: WeightLayout | None = None,
        has_expert_bias: bool = False,
        shared_experts: SharedExpertsConfig | None = None,
        capacity_factor: float | None = None,
        save: Save = "preact",
        backend: Backend = "auto",
        ep: "ExpertParallel | None" = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = MoEConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            router=router or RouterConfig(),
            activation=activation,
            layout=layout or WeightLayout(),
            has_expert_bias=has_expert_bias,
            shared_experts=shared_experts,
            capacity_factor=capacity_factor,
        )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        dispatcher, own = None, config
        if ep is not None:
            dispatcher = _dispatcher(ep, num_experts)
            own = config.with_experts(dispatcher.num_local_experts)
        self._assemble(
            config,
            Router.build(config, **place),
            Experts.build(own, save=save, backend=backend, **place),
            SharedExperts.build(config, **place) if shared_experts else None,
            dispatcher,
        )

    @classmethod
    def from_config(cls, config: MoEConfig, **options: Any) -> Self:
        """A new layer from a config; ``options`` are save, backend, ep, device and dtype."""
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return cls(**fields, **options)

    @classmethod
    def from_parts(
        cls,
        config: MoEConfig,
        router: Router,
        experts: nn.Module,
        shared_experts: nn.Module | None = None,
    ) -> Self:
        """A layer around parts that exist; their parameters stay the same objects.

        Args:
            config: of the layer.
            router: e.g. ``Router(config, weight)`` around another router's weight.
            experts: :class:`piper_kernels.modules.experts.Experts`, or any module that is called
                ``(x [T, H], expert_ids [T, K], gates [T, K]) -> [T, H]`` and takes ids E as
                sentinels, as Hugging Face's experts modules do.
            shared_experts: any module ``[T, H] -> [T, H]``, or ``None``.
        """
        moe = cls.__new__(cls)
        nn.Module.__init__(moe)
        moe._assemble(config, router, experts, shared_experts)
        return moe

    def _assemble(
        self,
        config: MoEConfig,
        router: Router,
        experts: nn.Module,
        shared_experts: nn.Module | None,
        dispatcher: "Dispatcher | None" = None,
    ) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts
        if config.num_experts > 1 and has_constant_gates(config.router, config.top_k):
            warnings.warn(
                "PiperMoE: top_k = 1 with normalised gates makes every gate 1, so the router gets "
                "no gradient from the output. Use RouterConfig(is_normalized=False) with kind "
                "'softmax_topk' or 'sigmoid_topk', or train the router by balance losses alone.",
                UserWarning,
                stacklevel=3,
            )

    def reset_parameters(self) -> None:
        """Initialise everything anew, e.g. after ``to_empty``."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        routing: Routing | None = None,
        return_stats: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        routing: Routing | None = None,
        return_stats: Literal[True],
    ) -> tuple[Tensor, MoEStats]: ...

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        routing: Routing | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, MoEStats]:
        """Send each token to its experts.

        Args:
            x: ``[..., H]`` with at least 2 dims, fp32, bf16, fp16 or fp64, any strides; T is the
                product of the leading dims.
            mask: ``[T]`` or x's leading dims, bool, integer or floating; not 0 is a real token.
                Padding costs no expert anything, counts nowhere, and gets 0 from the routed
                experts and no gradient through them.
            routing: choices to use instead of the router's, e.g. ``stats.routing`` of an earlier
                call: ids and gates as they are, also for capacity and padding. The router gets the
                gradient that flows through ``routing.gates``, or zeros; after that call's backward
                pass ``stats.routing.detach()``.
            return_stats: also return :class:`MoEStats`; its tensors are ``[T, ...]``.

        Returns:
            ``y``, or ``(y, stats)``. y has x's shape and dtype; under autocast the dtype that
            ``F.linear`` returns. The experts compute in their weights' dtype.

        Raises:
            ShapeError: x, mask or routing does not fit the layer.
            DtypeError: x is not floating.
            DeviceError: x and the parameters lie on different devices.
            ConfigError: both mask and routing are given.
            RoutingError: a real token's logits are not finite (see ``RouterConfig.non_finite``).
            TransferError: with expert parallelism: ranks disagree, or a peer died or hangs.
        """
        tokens, flat_mask = flatten_tokens(x, mask, self.router.weight)
        if routing is None:
            wanted = self.router(tokens, flat_mask)
            limited, num_dropped = self._limit(wanted)
        else:
            wanted = limited = adopt_routing(routing, self.config, tokens, mask, self.router)
            num_dropped = torch.zeros((), dtype=torch.int64, device=x.device)
        # before the experts: torch.compile(dynamic=True) makes the activation's constants inputs,
        # and cannot use outside the experts' autograd Function what it first met inside (2.13)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        chosen = limited.expert_ids, limited.gates
        if self.dispatcher is None:
            y = self.experts(tokens, *chosen)
        else:
            y = self.dispatcher.run(self.experts, tokens, *chosen)
        y = y if shared is None else y + shared
        if x.ndim != 2:
            # no view: wrappers and pipeline schedules that hook outputs refuse views
            y = torch.ops.aten._unsafe_view(y.contiguous(), x.shape)
        return (y, collect_stats(wanted, limited, num_dropped)) if return_stats else y

    def route(self, x: Tensor, *, mask: Tensor | None = None) -> Routing:
        """The routing that ``forward`` would use, capacity included.

        For activation checkpointing without routing twice: route outside the checkpointed region
        and pass the result as ``routing=``.

        Args:
            x: as in ``forward``.
            mask: as in ``forward``.
        """
        limited, _ = self._limit(self.router(*flatten_tokens(x, mask, self.router.weight)))
        return limited

    def explain(self, x: Tensor | int) -> Explanation:
        """Say which backend the routed experts would use for x, why, and how many bytes they keep.

        Nothing is computed. Print the result.

        Args:
            x: as in ``forward``, or a number of tokens in the parameters' dtype and device.

        Raises:
            ConfigError: the experts are a foreign module that cannot explain itself.
            PiperError: what ``forward`` would raise for x.

        Example:
            >>> moe = PiperMoE(hidden_size=16, intermediate_size=24, num_experts=8, top_k=2)
            >>> moe.explain(1000).backend
            'cpu'
        """
        if not isinstance(self.experts, Experts):
            remedy = "Foreign experts run as they please."
            given = type(self.experts).__name__
            raise ConfigError(
                instruction("PiperMoE.explain", "experts", "be piper_kernels' own", given, remedy)
            )
        if isinstance(x, int):
            # one row seen T times: a question costs no memory
            x = self.experts.down_proj.new_empty(1, self.config.hidden_size).expand(x, -1)
        tokens, _ = flatten_tokens(x, None, self.router.weight)
        shape = tokens.shape[0], self.config.top_k
        expert_ids = tokens.new_empty(1, 1, dtype=torch.int64).expand(shape)
        gates = tokens.new_empty(1, 1, dtype=torch.float32).expand(shape)
        return self.experts.explain(tokens, expert_ids, gates)

    def _limit(self, wanted: Routing) -> tuple[Routing, Tensor]:
        """Apply the capacity, if there is one; also the number of dropped slots."""
        if self.config.capacity_factor is None:
            return wanted, torch.zeros((), dtype=torch.int64, device=wanted.gates.device)
        return apply_capacity(wanted, self.config.capacity_factor)

    def extra_repr(self) -> str:
        """The sizes, and each setting that is not the default."""
        values = ((f, getattr(self.config, f.name)) for f in dataclasses.fields(self.config))
        return ", ".join(f"{f.name}={value!r}" for f, value in values if value != _default_of(f))


def _dispatcher(ep: "ExpertParallel", num_experts: int) -> "Dispatcher":
    """Loaded only where experts are shared among ranks."""
    from piper_kernels.dist.dispatcher import Dispatcher

    return Dispatcher(ep, num_experts)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
