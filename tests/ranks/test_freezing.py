"""A run with frozen parts keeps their weights, and stops, resumes and is sharded as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from horovod_volo.config.recipe import assemble, load_recipe
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.classification import Classification
from horovod_volo.models.build import freeze
from tests.ranks.launching import train

PARTS = "blocks:1,head"
SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "1")
MORE = ("--ema-decay", "0.9", "--clip-grad", "0", "--freeze", PARTS, "--eval-every", "2")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)  # 5 steps of 8 images per epoch
    return folder


def start(images: Path, output: Path, *arguments: str, ranks: int = 2) -> str:
    where = ("--output", str(output), "--name", "run", "--resume", "auto")
    how = "gloo" if ranks > 1 else "none"
    return train(str(images), *SMALL, *MORE, *where, *arguments, ranks=ranks, start_with=how).stdout


def last_state(output: Path) -> dict[str, dict[str, torch.Tensor]]:
    folder = output / "run" / "checkpoints" / "last"
    return {file.stem: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def test_frozen_weights_stay_and_the_state_is_that_of_the_others(images: Path, tmp_path: Path) -> None:
    plain, resumed = tmp_path / "plain", tmp_path / "resumed"
    text = start(images, plain)
    assert "done: 10 steps" in text
    assert f"parameters; frozen: {PARTS}; each rank sends " in text
    assert "stopped at step 3" in start(images, resumed, "--shard-optimizer", "--stop-at-step", "3")
    refused = start(images, resumed, "--freeze", "stem")
    assert f"has freeze {PARTS}, this run has stem" in refused
    assert f"Give --freeze {PARTS}, or start a new run with --finetune." in refused
    assert "done: 10 steps" in start(images, resumed, "--shard-optimizer")
    state = last_state(plain)
    assert_equal(state, last_state(resumed))

    config = assemble(load_recipe(str(plain / "run" / "resolved.toml")), fallback_name="")
    torch.manual_seed(config.run.seed)
    network = Classification().build(config, 10).module
    freeze(network, PARTS, ("head", "aux_head"))
    names = dict(network.named_parameters())
    for name, parameter in names.items():
        moved = not torch.equal(parameter, state["model"][name])
        assert moved == parameter.requires_grad == (f"{name}/exp_avg" in state["optimizer"]), name
        assert moved == (not torch.equal(parameter, state["ema"][name]))
    buffers = [name for name in state["model"] if name not in names]
    assert len(buffers) == 9  # mean, variance and count of three layers
    for name in buffers:
        assert torch.equal(dict(network.named_buffers())[name], state["model"][name]), name


def assert_equal(
    expected: dict[str, dict[str, torch.Tensor]], found: dict[str, dict[str, torch.Tensor]]
) -> None:
    assert expected.keys() == found.keys()
    for file, tensors in expected.items():
        assert tensors.keys() == found[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[file][name]), (file, name)
