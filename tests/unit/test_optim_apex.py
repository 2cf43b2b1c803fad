"""Apex's optimizers: their arguments and state, and errors where NVIDIA's Apex is missing or incomplete.

Apex needs a GPU. These tests replace it with a module of the same interface, so its updates are not tested.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from horovod_volo.core.errors import UserError
from horovod_volo.optim.build import build_optimizer, state_tensors


class FakeFusedOptimizer(Optimizer):
    """Has the arguments of Apex's optimizers, and counts steps per group as they do."""

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, {"lr": settings["lr"], "betas": settings["betas"], "eps": settings["eps"]})
        self.settings = settings

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in ("apex", "apex.optimizers", "amp_C"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        if name == "apex.optimizers":
            module.FusedAdam = module.FusedLAMB = FakeFusedOptimizer  # type: ignore[attr-defined]
            sys.modules["apex"].optimizers = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def build(name: str) -> tuple[FakeFusedOptimizer, nn.Linear]:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "weight_decay": 0.1, "lr_scale": 1.0},
        {"params": [model.bias], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    optimizer = build_optimizer(name, groups, momentum=0.9)
    assert isinstance(optimizer, FakeFusedOptimizer)
    return optimizer, model


@pytest.mark.parametrize("name", ["fusedadam", "fusedlamb"])
def test_gradients_are_not_freed_and_steps_are_in_the_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "apex", "apex.optimizers", "amp_C")
    optimizer, model = build(name)
    assert optimizer.settings["set_grad_none"] is False
    assert optimizer.settings.get("max_grad_norm", float("inf")) == float("inf")
    tensors = state_tensors(optimizer, dict(model.named_parameters()))
    assert set(tensors) == {
        "group.0/step",
        "group.1/step",
        *(f"{key}/{moment}" for key in ("weight", "bias") for moment in ("exp_avg", "exp_avg_sq")),
    }
    optimizer.step()
    assert tensors["group.0/step"].item() == 1  # the state is the tensor that the optimizer uses
    tensors["group.1/step"].copy_(torch.tensor(7))
    optimizer.step()
    assert optimizer.param_groups[1]["step"] == 8


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ((), "not installed"),
        (("apex",), "not NVIDIA's. Uninstall"),
        (("apex", "apex.optimizers"), "without its CUDA kernels"),
    ],
    ids=["none", "another apex", "without kernels"],
)
def test_what_is_missing_is_an_error_with_a_remedy(
    installed: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *installed)
    with pytest.raises(UserError, match=f"--opt fusedadam.*{message}.*--opt adamw"):
        build("fusedadam")
