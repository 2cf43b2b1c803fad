"""What is chosen where the command line names no model: for weights, images, ranks and the device."""

import time
from pathlib import Path

import pytest
import torch

from horovod_volo.config.command_line import parse, settings_chosen
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import dump, load_recipe
from horovod_volo.config.schema import Config, all_settings
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.errors import UserError
from horovod_volo.engine.classification import Classification
from horovod_volo.engine.open_settings import DeviceFacts, choose_settings
from horovod_volo.models.timm_api import get_pretrained_cfg, why_missing
from tests.smoke.conftest import publish

CPU, SMALL, LARGE, OLD = (
    DeviceFacts("cpu"),
    DeviceFacts("cuda", 11.9, "bf16"),
    DeviceFacts("cuda", 79.1, "bf16"),
    DeviceFacts("cuda", 31.7, "fp16"),
)


def chosen(
    *flags: str, images: int = 4000, ranks: int = 1, device: DeviceFacts = CPU, problem: str = "no network"
) -> Config:
    config = parse(["flowers", *flags]).config
    assert config.chooses_model
    return resolve(choose_settings(config, images, ranks, device, lambda _: problem), ranks)


def test_a_cpu_takes_a_small_published_network_and_fits_its_classifier() -> None:
    config = chosen(problem="")
    model, update = config.model, config.update
    assert model.finetune == f"timm:{model.model}"
    assert get_pretrained_cfg(model.model).hf_hub_id == f"timm/{model.model}"
    assert (model.fit_head, model.freeze, update.epochs, model.precision) == (True, "backbone", 0, "fp32")
    assert config.chosen.startswith(f"{model.model}, with timm's weights, images of 224 px, a classifier")
    assert "0 epochs" not in config.chosen
    assert derive(config, ranks=1, images=4000).total_steps == 0
    tuned = chosen("--epochs", "3", problem="")
    assert (tuned.model.fit_head, tuned.model.freeze, tuned.update.epochs) == (True, "", 3)
    assert tuned.update.layer_decay == load_recipe("finetune_folder")["layer_decay"]
    assert [chosen(images=images, problem="").data.batch_size for images in (7, 61, 400)] == [4, 8, 16]


def test_a_gpu_fine_tunes_as_the_recipe_does() -> None:
    config, recipe = chosen(problem="", device=LARGE), load_recipe("finetune_folder")
    found = {item.name: item.value_in(config) for item in all_settings()}
    assert {name: found[name] for name in recipe} == recipe
    assert chosen(problem="", device=OLD).model.precision == "fp16"
    assert config.chosen.startswith("volo_d1, with timm's weights, images of 224 px, 32 of them a batch")


def test_where_weights_come_from(tmp_path: Path) -> None:
    (tmp_path / "resolved.toml").write_text('[model]\nmodel = "volo_demo"\nimg_size = 96\n')
    of_run = chosen("--weights", str(tmp_path)).model
    assert (of_run.model, of_run.img_size, of_run.finetune) == ("volo_demo", 96, str(tmp_path))
    of_timm = chosen("--finetune", "timm:volo_d2_224.sail_in1k").model
    assert (of_timm.model, of_timm.finetune) == ("volo_d2", "timm:volo_d2_224.sail_in1k")
    of_file = chosen("--weights", "w.safetensors").model
    assert (of_file.model, of_file.finetune) == (chosen(problem="").model.model, "w.safetensors")
    for flags in (["--from-scratch"], ["--token-label"], ["--from-scratch", "--epochs", "2"]):
        config = chosen(*flags, problem="")
        assert (config.model.model, config.model.finetune, config.model.fit_head) == ("volo_demo", "", False)
    assert chosen("--from-scratch").warnings == ()
    (warning,) = chosen(problem="no network").warnings
    assert all(part in warning for part in ("from scratch", "(no network)", "--weights FILE")), warning


def test_weights_are_in_the_cache_or_missing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "resnet10t.c3_in1k"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "OfflineModeIsEnabled" in why_missing(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    address = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address)
    began = time.monotonic()
    assert "refused" in why_missing(name)
    assert time.monotonic() - began < 10  # five retries would take 23 seconds
    publish(tmp_path, name, {"weight": torch.zeros(1)})
    assert why_missing(name) == ""


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (CPU, ("volo_demo", 64, "fp32", 64)),
        (SMALL, ("volo_d1", 224, "bf16", 32)),
        (LARGE, ("volo_d1", 224, "bf16", 128)),
        (OLD, ("volo_d1", 224, "fp16", 128)),
    ],
)
def test_a_device_takes_a_network_an_arithmetic_and_a_batch_that_it_has(device, expected):
    config = chosen(images=100_000, device=device)
    found = (config.model.model, config.model.img_size, config.model.precision, config.data.batch_size)
    assert found == expected
    assert "100,000 images" in config.chosen


@pytest.mark.parametrize("device", [CPU, LARGE])
@pytest.mark.parametrize("images", [7, 5_000, 1_281_167])
@pytest.mark.parametrize("ranks", [1, 5])
def test_every_choice_is_a_run_whose_learning_rates_are_those_of_its_batch(device, images, ranks):
    config = chosen(images=images, ranks=ranks, device=device)
    before = parse(["flowers"]).config
    changed = {item.name for item in all_settings() if item.value_in(config) != item.value_in(before)}
    assert changed <= settings_chosen() | {"accumulation"}  # which the help shows as chosen
    derived = derive(config, ranks=ranks, images=images)
    assert derived.epochs == config.update.epochs
    assert derived.steps_per_epoch >= 20 or config.data.batch_size == 1
    assert 0 <= derived.warmup_steps < derived.total_steps
    peak, highest = (0.006 / 32, 0.012) if device == CPU else (0.0016 / 1024, 0.004)
    assert derived.peak_lr == pytest.approx(min(highest, peak * derived.global_batch))
    assert derived.warmup_lr < derived.min_lr < derived.peak_lr


def test_flags_are_not_changed() -> None:
    flags = "--epochs 3 --warmup-epochs 0 --img-size 96 --no-token-label --batch-size 5 --lr 0.01"
    config = chosen(*flags.split(), "--min-lr", "0.001", "--aa", "rand-m7-n3")
    assert (config.update.epochs, config.update.cooldown_epochs, config.model.img_size) == (3, 0, 96)
    assert (config.objective.token_label, config.data.batch_size, config.data.aa) == (False, 5, "rand-m7-n3")
    derived = derive(config, ranks=1, images=4000)
    assert (derived.peak_lr, derived.min_lr) == (0.01, 0.001)
    assert "epochs" not in config.chosen.split(":")[0]
    assert chosen("--mixup", "0").objective == chosen().objective
    objective = chosen("--mixup", "0.8").objective
    assert (objective.mix_token, objective.token_label) == (False, False)
    split = chosen("--global-batch", "96", ranks=2, images=100_000)
    assert (split.data.batch_size, split.update.accumulation, split.update.lr_base_size) == (24, 2, 96)
    for flag, rate in {"opt=adamw": 1, "shard-optimizer": 1, "opt=muon": 12, "min-lr=1e-4": 12}.items():
        assert chosen(f"--{flag}", images=5_000).update.lr_base == pytest.approx(rate / 1000), flag


def test_a_resumed_run_takes_the_settings_of_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "flowers"
    run.mkdir(parents=True)
    flags = ("--global-batch", "96", "--stop-at-step", "100")
    (run / "resolved.toml").write_text(dump(chosen(*flags, ranks=2, images=1000)))
    output = ("--output", str(run.parent))
    assert parse(["flowers", *output]).config.chooses_model  # a new run
    assert parse(["flowers", *output, "--resume", "auto"]).config.chooses_model  # it has saved nothing
    checkpoints = run / "checkpoints"
    (checkpoints / "step_00000100").mkdir(parents=True)
    (checkpoints / "last").symlink_to("step_00000100")
    for resume in ("auto", str(run), str(checkpoints / "step_00000100"), str(checkpoints / "last")):
        config = parse(["flowers", *output, "--resume", resume]).config
        assert not config.chooses_model
        assert (config.model.model, config.update.epochs, config.run.stop_at_step) == ("volo_demo", 60, 0)
        assert config_warnings(config) == []  # nothing in these settings was stated by the user


def test_what_names_a_model_or_a_recipe_is_not_open() -> None:
    for flags in (["--model", "volo_d1"], ["--recipe", "demo"], ["--task", "segmentation"]):
        assert not parse(["images", *flags]).config.chooses_model


def test_a_model_without_tokens_is_trained_without_mixtoken() -> None:
    complete = Classification().complete
    config = complete(parse(["images", "--model", "resnet18"]).config)
    assert not config.objective.mix_token
    assert any("without MixToken" in text for text in config.warnings)
    with pytest.raises(UserError, match="resnet18 gives no token logits"):
        complete(parse(["images", "--model", "resnet18", "--mix-token"]).config)
    with_tokens = parse(["images", "--model", "volo_d2"]).config
    assert complete(with_tokens) is with_tokens


@pytest.mark.parametrize(
    ("flags", "epochs", "warmup", "cooldown"),
    [
        ("--epochs 1", 1, 0, 0),
        ("--epochs 30", 30, 2, 0),
        ("--epochs 400", 400, 20, 0),
        ("--epochs 300", 300, 20, 10),  # the published ones
        ("--epochs 30 --warmup-epochs 5", 30, 5, 10),  # a published command line
        ("--model resnet18 --epochs 30 --warmup-epochs 5", 30, 5, 0),  # as timm
        ("--recipe volo_d1_384 --epochs 30", 30, 5, 10),  # as in the recipe
        ("--recipe volo_d1_384 --epochs 12", 12, 2, 0),
    ],
)
def test_epochs_alone_are_the_length_of_the_run(flags: str, epochs: int, warmup: int, cooldown: int) -> None:
    update = parse(["images", "--model", "volo_d1", *flags.split()]).config.update
    assert (update.epochs, update.warmup_epochs, update.cooldown_epochs) == (epochs, warmup, cooldown)
