"""Frozen parts: which parameters they are, and what they cost."""

import pytest
import torch
from torch import nn

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.command_line import parse
from horovod_volo.config.schema import RESUMED
from horovod_volo.config.update_settings import Exchange
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.errors import UserError
from horovod_volo.dry_run import dry_run
from horovod_volo.models.build import build_model, freeze, start_training

HEADS = ("head", "aux_head")


def demo() -> nn.Module:
    torch.manual_seed(0)
    return build_model("volo_demo", img_size=32, num_classes=10, drop_path=0.0)


def trained(parts: str) -> list[str]:
    network = demo()
    freeze(network, parts, HEADS)
    return [name for name, parameter in network.named_parameters() if parameter.requires_grad]


def test_a_part_is_the_backbone_or_a_prefix() -> None:
    assert trained("backbone") == ["aux_head.weight", "aux_head.bias", "head.weight", "head.bias"]
    prefixes = ("patch_embed", "network.2.0.attn")
    assert trained(", ".join(prefixes)) == [name for name in trained("") if not name.startswith(prefixes)]
    # A part that is called so is the backbone.
    network = nn.ModuleDict({"backbone": nn.Linear(2, 2), "neck": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    freeze(network, "backbone", ("head",))
    frozen = [name for name, each in network.named_parameters() if not each.requires_grad]
    assert frozen == ["backbone.weight", "backbone.bias"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ("patch_embd", "--freeze patch_embd: .* Did you mean patch_embed"),
        ("stem", "--freeze stem: no parameter"),
        ("backbone,head,aux_head", "--freeze backbone,head,aux_head leaves no parameter to train"),
    ],
)
def test_mistakes(parts: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(parts)


def test_frozen_batch_norm_keeps_its_statistics_and_others_move_theirs() -> None:
    network = demo()
    freeze(network, "patch_embed.conv.1", HEADS)
    start_training(network.eval())
    frozen, other = network.patch_embed.conv[1], network.patch_embed.conv[4]  # type: ignore[index, union-attr]
    images = torch.randn(4, 3, 32, 32)
    network(images)
    assert torch.equal(frozen.running_mean, torch.zeros_like(frozen.running_mean))
    assert int(frozen.num_batches_tracked) == 0
    assert other.running_mean.abs().sum() > 0
    assert network.training
    assert network.network[0].training  # type: ignore[index, union-attr]


def test_frozen_parameters_are_in_no_bucket_and_their_statistics_are_not_averaged() -> None:
    network = demo()
    freeze(network, "patch_embed, pos_embed, cls_token, network", HEADS)
    start_training(network)
    reducer = Reducer(network, World.single(), Exchange(compression="none"), micro_batches=1)
    names = {name for name, each in network.named_parameters() if each.requires_grad}
    assert {name for bucket in reducer.buckets for name in bucket.parameters} == names
    assert reducer.local_parameters.keys() == names
    averaged = reducer.statistics._averaged
    assert averaged.numel() < 100  # no batch norm is left that moves
    network(torch.randn(2, 3, 32, 32)).sum().backward()
    with reducer.synchronized_gradients():
        assert all((each.grad is not None) == each.requires_grad for each in network.parameters())


def test_a_dry_run_counts_what_trains_and_what_is_sent() -> None:
    flags = ["--recipe", "volo_d1", "--no-token-label", "--num-classes", "10", "--freeze", "backbone"]
    config = parse(flags).config
    text, whole = dry_run(config, 8), dry_run(parse(flags[:-2]).config, 8)
    assert "training  3,850 of 25," in text
    assert "parameters; frozen: backbone; each rank sends 0.01 MiB of gradients per step" in text
    assert "training  " not in whole
    assert "about 0.1 GiB of state and 0.0 GiB of activations" in text
    assert "about 0.4 GiB of state" in whole


def test_random_weights_that_stay_are_warned_of() -> None:
    warning = "--freeze without --finetune: the frozen weights are random, and stay so"
    config = parse(["--freeze", "backbone"]).config
    assert warning in config_warnings(config)
    assert warning not in config_warnings(config, [RESUMED])
    assert warning not in config_warnings(parse(["--freeze", "backbone", "--finetune", "run"]).config)
