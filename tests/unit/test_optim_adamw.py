"""AdamW: timm's groups, torch's steps to the bit, and a state that is there before the first step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import horovod_volo.models.timm_door  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.models.build import build_model
from horovod_volo.models.volo import Volo
from horovod_volo.optim.adamw import build_optimizer, parameter_groups, set_lr, state_tensors

param_groups_weight_decay = pytest.importorskip("timm.optim").param_groups_weight_decay
DECAY = 0.05


@pytest.fixture
def model() -> Volo:
    torch.manual_seed(0)
    return build_model("volo_demo", img_size=32, num_classes=5, drop_path=0.0)


def build(model: Volo) -> AdamW:
    return build_optimizer(model, exempt=model.no_weight_decay(), weight_decay=DECAY)


def set_gradients(model: nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def test_groups_are_timms(model: Volo) -> None:
    theirs = param_groups_weight_decay(model, DECAY, no_weight_decay_list=model.no_weight_decay())
    ours = parameter_groups(model, exempt=model.no_weight_decay(), weight_decay=DECAY)
    assert (
        [group["weight_decay"] for group in ours]
        == [group["weight_decay"] for group in theirs]
        == [0.0, DECAY]
    )
    for our, their in zip(ours, theirs, strict=True):
        assert [id(parameter) for parameter in our["params"]] == [
            id(parameter) for parameter in their["params"]
        ]
    assert sum(len(group["params"]) for group in ours) == len(list(model.parameters()))


def test_what_is_exempt_from_decay(model: Volo) -> None:
    exempt = {id(parameter) for parameter in build(model).param_groups[0]["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in exempt}
    assert {"pos_embed", "cls_token", "head.bias", "norm.weight"} <= names
    assert "head.weight" not in names
    assert "patch_embed.proj.weight" not in names


def test_five_steps_are_those_of_a_plain_adamw(model: Volo) -> None:
    other = copy.deepcopy(model)
    optimizer = build(model)
    undecayed = [p for n, p in other.named_parameters() if p.ndim == 1 or n in ("pos_embed", "cls_token")]
    decayed = [p for n, p in other.named_parameters() if not (p.ndim == 1 or n in ("pos_embed", "cls_token"))]
    plain = AdamW(
        [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed, "weight_decay": DECAY}],
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )
    for step in range(5):
        lr = 1e-3 * (step + 1)
        set_lr(optimizer, lr)
        for group in plain.param_groups:
            group["lr"] = lr
        set_gradients(model, step)
        set_gradients(other, step)
        optimizer.step()
        plain.step()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        for key, tensor in plain.state[theirs].items():
            assert torch.equal(optimizer.state[ours][key], tensor), (name, key)


def test_steps_are_those_of_the_definition(model: Volo) -> None:
    optimizer = build(model)
    set_lr(optimizer, 0.01)
    start = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    gradients: list[dict[str, Tensor]] = []
    for step in range(3):
        set_gradients(model, step)
        gradients.append({n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    for name, decay in (("head.weight", DECAY), ("head.bias", 0.0), ("pos_embed", 0.0)):
        weight, mean, square = start[name], torch.zeros(()), torch.zeros(())
        for step, all_gradients in enumerate(gradients, start=1):
            gradient = all_gradients[name]
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            weight = weight - 0.01 * decay * weight
            weight = weight - 0.01 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        torch.testing.assert_close(model.get_parameter(name).double(), weight, rtol=1e-5, atol=1e-6)


def test_the_state_is_there_before_the_first_step_and_stays_the_same_tensors(model: Volo) -> None:
    before = copy.deepcopy(model.state_dict())
    optimizer = build(model)
    tensors = state_tensors(optimizer, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert set(tensors) == {
        f"{name}/{key}" for name, _ in model.named_parameters() for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert not any(tensor.any() for tensor in tensors.values())
    set_lr(optimizer, 1e-3)
    set_gradients(model, 0)
    optimizer.step()
    after = state_tensors(optimizer, model)
    assert all(after[name] is tensors[name] for name in tensors)
    assert {float(after[name]) for name in after if name.endswith("/step")} == {1.0}
    assert all(tensor.any() for tensor in tensors.values())


def test_a_fresh_optimizer_changes_no_weight_until_a_rate_is_set(model: Volo) -> None:
    before = copy.deepcopy(model.state_dict())
    optimizer = build(model)
    set_gradients(model, 0)
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_state_keeps_the_strides_of_channels_last_weights(model: Volo) -> None:
    model.to(memory_format=torch.channels_last)
    tensors = state_tensors(build(model), model)
    name = "patch_embed.conv.0.weight"
    assert not model.get_parameter(name).is_contiguous()
    assert tensors[f"{name}/exp_avg"].stride() == model.get_parameter(name).stride()


def test_the_rate_is_set_in_every_group(model: Volo) -> None:
    optimizer = build(model)
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
