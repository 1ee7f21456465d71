"""A stand-in for Apex's optimizers, as far as Megatron-LM's tests need them.

The tests save the distributed optimizer before its first step, which works only with Apex.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam with one step count for each group. It needs no learning rate before the first step."""

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: object,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt() + group["eps"]
                parameter.sub_((mean / spread + group["weight_decay"] * parameter) * (group["lr"] or 1e-3))


def stand_in() -> None:
    """Make megatron-core find these optimizers, and nothing else of Apex."""
    optimizers = ModuleType("apex.optimizers")
    optimizers.__dict__.update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    sys.modules[optimizers.__name__] = optimizers
