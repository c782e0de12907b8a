"""Which layer first gave a number that is not finite: noted on the device, read when it matters."""

from typing import Any

import torch
from torch import Tensor, nn

from piper_kernels.pipeline.stage import PassOn, Stage, base_model


class NonFiniteWatch:
    """Watches the outputs of a stage's embedding, layers and head.

    One sum over each output, without a host synchronisation.

    Args:
        stage: to be watched from now on.
    """

    def __init__(self, stage: Stage) -> None:
        base = base_model(stage.model)
        modules: list[tuple[str, nn.Module]] = []
        if stage.place.is_first:
            modules.append(("embedding", base.embed_tokens))
        modules += [
            (f"layer {number}", layer)
            for number, layer in enumerate(base.layers)
            if not isinstance(layer, PassOn)
        ]
        if stage.place.is_last:
            modules.append(("head", stage.model.lm_head))
        self._names = [name for name, _ in modules]
        device = next(stage.parameters()).device
        self._is_bad = torch.zeros(len(modules), dtype=torch.bool, device=device)
        for index, (_, module) in enumerate(modules):
            module.register_forward_hook(self._hook(index))

    def reset(self) -> None:
        """Forget, before a step."""
        self._is_bad.zero_()

    def finding(self) -> str:
        """The first place whose output was not finite since ``reset``; empty if there is none."""
        flags = self._is_bad.tolist()
        return self._names[flags.index(True)] if any(flags) else ""

    def _hook(self, index: int) -> Any:
        flag = self._is_bad[index]

        def note(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor):
                # a sum is not finite as soon as one number is not; nor is one that overflows
                flag.logical_or_(~tensor.detach().sum(dtype=torch.float32).isfinite())

        return note
