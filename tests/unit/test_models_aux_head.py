"""Evaluation uses the auxiliary head only where it was trained."""

from pathlib import Path

import pytest
import torch
from network_samples import perturbed, random_images, unchanged, without_aux_head
from torch import nn

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.task_settings import Objective
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, training_forward
from horovod_volo.models.pretrained import load_pretrained, reason_to_leave_out
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import NO_BOX
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr

CLASSES, SIDE = 10, 32
NEVER = "the auxiliary head was never trained, its biases are all 0"


def network(name: str = "volo_demo", *, aux_head: bool = True, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, img_size=SIDE, num_classes=classes, drop_path=0.0, aux_head=aux_head)


# Networks without an auxiliary head


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
def test_initial_weights_are_the_same_with_and_without_the_head(name: str) -> None:
    own = network(name, aux_head=False).state_dict()
    expected = without_aux_head(network(name).state_dict())
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", ["volo_demo", "lvvit_t"])
@torch.inference_mode()
def test_without_the_head_the_logits_are_those_of_the_class_token(name: str) -> None:
    whole, images = perturbed(network(name)), random_images(4, SIDE)
    model = network(name, aux_head=False)
    model.load_state_dict(without_aux_head(whole.state_dict()))
    for swap_tokens in (unchanged, lambda grid: grid.flip(0)):
        class_logits, token_logits = training_forward(model)(images, swap_tokens)
        torch.testing.assert_close(class_logits, training_forward(whole)(images, swap_tokens)[0])
        assert token_logits.shape == (4, 0, CLASSES)
    features = whole.eval().forward_features(images)
    torch.testing.assert_close(model.eval()(images), whole.head(features[:, 0]))
    assert (model(images) - whole(images)).abs().max() > 1e-2


# Weights whose auxiliary head was trained


def trained(objective: Objective, *, opt: str = "adamw", steps: int = 3, classes: int = CLASSES) -> nn.Module:
    """Train a network with the head for some steps, as versions did in which every network had one."""
    model = network(classes=classes).train()
    reducer = Reducer(model, World.single(), Exchange(compression="none"), micro_batches=1)
    named = dict(model.named_parameters())
    groups = parameter_groups(named, named, exempt=(), weight_decay=0.05, layers={}, layer_decay=1.0)
    optimizer = build_optimizer(opt, groups, momentum=0.9)
    set_lr(optimizer, 0.01)
    loss = build_loss(objective, classes, SIDE // 16)
    for step in range(steps):
        labels = Labels(torch.arange(4) + step)
        logits = model.training_logits(random_images(4, SIDE), unchanged)
        loss(*logits, labels, NO_BOX).total.backward()
        with reducer.synchronized_gradients():
            optimizer.step()
    return model


def reason_of(model: nn.Module) -> str:
    return reason_to_leave_out(model.state_dict(), {}, "auto", "some.pth")


@pytest.mark.parametrize("opt", ["adamw", "lamb", "lars", "sgd"])
@pytest.mark.parametrize("objective", [Objective(), Objective(token_label=True, dense_weight=0.0)])
def test_a_head_that_only_weight_decay_changed_is_left_out(objective: Objective, opt: str) -> None:
    model = trained(objective, opt=opt)
    fresh = network()
    assert not torch.equal(model.head.bias, fresh.head.bias), "nothing was trained"
    assert reason_of(model) == NEVER
    assert not torch.equal(model.aux_head.weight, fresh.aux_head.weight), "it does not decay"


@pytest.mark.parametrize(("opt", "classes"), [("adamw", 21_841), ("lamb", 10), ("lars", 10), ("sgd", 10)])
def test_a_head_trained_for_one_step_is_used(opt: str, classes: int) -> None:
    model = trained(Objective(token_label=True), opt=opt, steps=1, classes=classes)
    assert reason_of(model) == ""
    assert model.aux_head.bias.all()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    torch.save(perturbed(network()).state_dict(), tmp_path / "weights.pth")
    (tmp_path / "resolved.toml").write_text(f'[model]\nmodel = "volo_demo"\nimg_size = {SIDE}\n')
    return tmp_path


def test_weights_are_loaded_with_or_without_the_head(run_folder: Path) -> None:
    """After fine-tuning without token labels the head is that of the initial weights, trained with others."""
    images, whole = random_images(2, SIDE), perturbed(network()).eval()
    recipe = run_folder / "resolved.toml"
    original = recipe.read_text()
    untrained = "the run did not train the auxiliary head"
    for settings, choice, reason in (
        ("", "auto", ""),
        ("", "off", "--aux-head off"),
        ("token_label = true\ndense_weight = 0.5\n", "auto", ""),
        ("token_label = false\ndense_weight = 0.5\n", "auto", untrained),
        ("token_label = true\ndense_weight = 0.0\n", "auto", untrained),
        ("token_label = false\n", "on", ""),
    ):
        recipe.write_text(f"{original}[objective]\n{settings}")
        loaded = load_pretrained(str(run_folder), aux_head=choice)
        has = loaded.has_aux_head
        assert has == (not reason)
        assert (f"evaluated by the class token alone: {reason}" in loaded.messages) != has
        with torch.inference_mode():
            expected = whole(images) if has else whole.head(whole.forward_features(images)[:, 0])
            torch.testing.assert_close(loaded.network(images), expected)


def test_a_missing_head_cannot_be_requested(run_folder: Path) -> None:
    torch.save(without_aux_head(network().state_dict()), run_folder / "weights.pth")
    with pytest.raises(UserError, match=r"have no auxiliary head\. Drop --aux-head on"):
        load_pretrained(str(run_folder), aux_head="on")
