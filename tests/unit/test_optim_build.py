"""Optimizers have timm's parameter groups, timm's and torch's steps, and complete state from the start."""

import copy
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, exempt_from_decay, hidden_matrices, layer_numbers
from horovod_volo.models.volo import Volo
from horovod_volo.optim import build as optim

timm_optim = pytest.importorskip("timm.optim")
param_groups_layer_decay = timm_optim.param_groups_layer_decay
DECAY = 0.05


@pytest.fixture
def model() -> Volo:
    torch.manual_seed(0)
    return build_model("volo_demo", img_size=32, num_classes=5, drop_path=0.0)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def groups(
    model: nn.Module, layer_decay: float = 1.0, matrices: Collection[str] = ()
) -> list[dict[str, Any]]:
    layers = layer_numbers(model) if layer_decay != 1 else {}
    named, exempt = named_parameters(model), exempt_from_decay(model)
    decays = {"weight_decay": DECAY, "layers": layers, "layer_decay": layer_decay}
    return optim.parameter_groups(named, named, exempt=exempt, matrices=matrices, **decays)


def build(model: Volo, name: str = "adamw") -> Optimizer:
    return optim.build_optimizer(name, groups(model), momentum=0.9)


def set_gradients(model: nn.Module, step: int) -> None:
    """Draw gradients that are in memory like the weights, as the reducer's are."""
    random = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t", "vit_tiny_patch16_224"])
@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_weight_decay_and_the_learning_rates_of_layers_are_timms(name: str, layer_decay: float) -> None:
    model = build_model(name, img_size=32, num_classes=5, drop_path=0.0)
    exempt = model.no_weight_decay()
    theirs = param_groups_layer_decay(model, DECAY, no_weight_decay_list=exempt, layer_decay=layer_decay)
    expected = {id(p): (g["lr_scale"], g["weight_decay"]) for g in theirs for p in g["params"]}
    ours = groups(model, layer_decay)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in ours for p in g["params"]}
    assert found.keys() == expected.keys()
    for key, (scale, decay) in found.items():
        assert (scale, decay) == (pytest.approx(expected[key][0]), expected[key][1])
    assert {decay for _, decay in found.values()} == {0.0, DECAY}
    assert (len({scale for scale, _ in found.values()}) > 3) == (layer_decay < 1)
    layers = {"lvvit_t": {"pos_embed": 13, "blocks.0.norm1.weight": 12, "norm.weight": 1, "head.weight": 0}}
    for parameter, below in layers.get(name, {}).items():
        assert found[id(model.get_parameter(parameter))][0] == pytest.approx(layer_decay**below)
    optimizer = optim.build_optimizer("adamw", ours, momentum=0.9)
    optim.set_lr(optimizer, 0.5)
    assert {group["lr"] / group["lr_scale"] for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("name", ["lamb", "lars", "sgd"])
def test_steps_equal_timms_and_torchs(name: str, model: Volo) -> None:
    """LAMB without timm's built-in clipping, LARS with a trust coefficient of 0.001, SGD with momentum."""
    other = copy.deepcopy(model)
    ours = build(model, name)
    undecayed, decayed = groups(other)
    plain = [{**undecayed, "lr": 0.0}, {**decayed, "lr": 0.0}]
    theirs: Optimizer = {
        "lamb": lambda: timm_optim.Lamb(plain, eps=1e-6, max_grad_norm=None),
        "lars": lambda: timm_optim.Lars(plain, momentum=0.9, trust_coeff=1e-3, eps=0.0),
        "sgd": lambda: torch.optim.SGD(plain, momentum=0.9),
    }[name]()
    start = nn.utils.parameters_to_vector(other.parameters()).clone()
    for step in range(5):
        lr = (step + 1) * {"lamb": 1e-3, "lars": 1.0, "sgd": 1e-3}[name]
        optim.set_lr(ours, lr)
        for group in theirs.param_groups:
            group["lr"] = lr
        set_gradients(model, step)
        set_gradients(other, step)
        ours.step()
        theirs.step()
    assert (nn.utils.parameters_to_vector(other.parameters()) - start).abs().max() > 1e-3
    for (key, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_betas_and_eps_are_those_of_the_settings(model: Volo, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex", "apex.optimizers", "amp_C")
    constants: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-3}
    for name in ("adamw", "lamb", "muon", "fusedadam", "fusedlamb"):
        optimizer = optim.build_optimizer(name, groups(model), momentum=0.9, **constants)
        group = getattr(optimizer, "_adamw", optimizer).param_groups[0]  # of Muon
        assert {key: group[key] for key in constants} == constants
    for name in ("lars", "sgd"):
        with pytest.raises(UserError, match=f"--opt {name} has no eps. Drop --opt-eps, or use --opt adamw"):
            optim.check_optimizer(name, sharded=False, eps=1e-3)


@pytest.mark.parametrize("name", ["adamw", "lamb", "lars", "sgd", "muon"])
def test_no_optimizer_adds_state_during_training(name: str, model: Volo) -> None:
    matrices = hidden_matrices(model, ("head", "aux_head")) if name == "muon" else set()
    optimizer = optim.build_optimizer(name, groups(model, matrices=matrices), momentum=0.9)
    before, spec = optim.state_tensors(optimizer, named_parameters(model)), optim.OPTIMIZERS.find(name)
    assert not any(tensor.any() for tensor in before.values())
    of_matrices = {f"{matrix}/{key}" for matrix in matrices for key in spec.matrix_state_keys}
    others = named_parameters(model).keys() - matrices
    assert before.keys() == of_matrices | {f"{other}/{key}" for other in others for key in spec.state_keys}
    optim.set_lr(optimizer, 1e-3)
    set_gradients(model, 0)
    optimizer.step()
    after = optim.state_tensors(optimizer, named_parameters(model))
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] and before[key].any() for key in after)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_zero_weights_or_gradients_give_finite_weights(name: str) -> None:
    """The trust ratio divides norms, which are 0 where all weights or gradients are."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.zero_()
    group = {"params": [model.weight], "weight_decay": 0.1, "lr_scale": 1.0}
    optimizer = optim.build_optimizer(name, [group], momentum=0.9)
    optim.set_lr(optimizer, 1.0)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert not model.weight.any()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert model.weight.isfinite().all()
    assert model.weight.any()


def test_state_keeps_the_strides_of_channels_last_weights(model: Volo) -> None:
    model.to(memory_format=torch.channels_last)
    tensors = optim.state_tensors(build(model), named_parameters(model))
    name = "patch_embed.conv.0.weight"
    assert not model.get_parameter(name).is_contiguous()
    assert tensors[f"{name}/exp_avg"].stride() == model.get_parameter(name).stride()


# Apex's optimizers need a GPU. Here a module of the same interface replaces it, so updates are not tested.


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


def build_fused(name: str) -> tuple[FakeFusedOptimizer, nn.Linear]:
    model = nn.Linear(2, 2)
    groups = [
        {"params": [model.weight], "weight_decay": 0.1, "lr_scale": 1.0},
        {"params": [model.bias], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    optimizer = optim.build_optimizer(name, groups, momentum=0.9)
    assert isinstance(optimizer, FakeFusedOptimizer)
    return optimizer, model


@pytest.mark.parametrize("name", ["fusedadam", "fusedlamb"])
def test_gradients_are_not_freed_and_steps_are_in_the_state(name, monkeypatch):
    install(monkeypatch, "apex", "apex.optimizers", "amp_C")
    optimizer, model = build_fused(name)
    assert optimizer.settings["set_grad_none"] is False
    assert optimizer.settings.get("max_grad_norm", float("inf")) == float("inf")
    tensors = optim.state_tensors(optimizer, named_parameters(model))
    moments = {f"{key}/{moment}" for key in ("weight", "bias") for moment in ("exp_avg", "exp_avg_sq")}
    assert set(tensors) == {"group.0/step", "group.1/step"} | moments
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
def test_what_is_missing_is_an_error_with_a_remedy(installed, message, monkeypatch):
    install(monkeypatch, *installed)
    with pytest.raises(UserError, match=f"--opt fusedadam.*{message}.*--opt adamw"):
        build_fused("fusedadam")
