"""The published command lines are accepted as printed; dry runs show the resulting settings and sizes."""

from __future__ import annotations

import shlex
import tomllib
from typing import Any

import pytest

from tests.smoke.conftest import run_entry, run_here

PRETRAIN = r"""
    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet \
      --model volo_d5 --img-size 224 -b 44 --lr 1.0e-4 --drop-path 0.75 --apex-amp \
      --token-label --token-label-size 14 --token-label-data /path/to/token_label_data
"""
FINETUNE = r"""
    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet \
      --model volo_d5 --img-size 512 -b 4 --lr 2.3e-5 --drop-path 0.5 --apex-amp --epochs 30 \
      --weight-decay 1.0e-8 --warmup-epochs 5 --ground-truth \
      --token-label --token-label-size 24 --token-label-data /path/to/token_label_data \
      --finetune /path/to/pretrained_224_volo_d5/
"""
# TokenLabeling's command lines, with horovodrun in place of its launcher.
LVVIT = r"""
    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet \
      --model lvvit_s -b 128 --apex-amp --img-size 224 --drop-path 0.1 \
      --token-label --token-label-data /path/to/label_data --token-label-size 14 --model-ema
"""
LVVIT_FINETUNE = r"""
    horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet \
      --model lvvit_s -b 64 --apex-amp --img-size 384 --drop-path 0.1 \
      --token-label --token-label-data /path/to/label_data --token-label-size 24 \
      --lr 5.e-6 --min-lr 5.e-6 --weight-decay 1.e-8 --finetune /path/to/checkpoint
"""
LVVIT_TRANSFER = r"""
    horovodrun -np 8 python -m horovod_volo.train /path/to/dataset \
      --model lvvit_s -b 64 --apex-amp --img-size 224 --drop-path 0.1 \
      --token-label --token-label-size 14 --dense-weight 0.0 --num-classes 1000 --finetune /path/to/checkpoint
"""


def arguments_of(command: str) -> list[str]:
    arguments = shlex.split(command.replace("\\\n", " "))
    launch = shlex.split("horovodrun -np 8 python -m horovod_volo.train")
    assert arguments[: len(launch)] == launch
    return arguments[len(launch) :]


def parse_dry_run(lines: list[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Split the output of a dry run into settings, properties and warnings."""
    first_property = next(number for number, line in enumerate(lines) if line.startswith("     ranks  "))
    settings = tomllib.loads("\n".join(lines[:first_property]))
    properties = [(line[:10].strip(), line[12:]) for line in lines[first_property:]]
    return settings, dict(properties), [text for name, text in properties if name == "warning"]


def dry_run(
    command: str, streams: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    result = run_here(*arguments_of(command), "--dry-run", "--ranks", "8", streams=streams)
    assert result.status == 0, result.output
    return parse_dry_run(result.lines)


def test_pretraining_of_the_largest_network(capfd: pytest.CaptureFixture[str]) -> None:
    settings, properties, warnings = dry_run(PRETRAIN, capfd)
    assert properties["ranks"] == "8"
    assert properties["model"] == "volo_d5, 295,455,584 parameters, 224 px"
    assert properties["images"] == "1,281,167 of 1,000 classes"
    assert properties["batch"] == "352 images per step = 8 ranks x 44 images x 1 micro-batches"
    assert properties["lr"] == "peak 0.0001, as given by --lr"
    assert properties["length"] == "310 epochs x 3,639 steps = 1,128,090 steps (72,780 of warm-up)"
    assert properties["precision"].startswith("fp16; ")
    assert settings["model"]["drop_path"] == 0.75
    assert settings["objective"]["token_label_data"] == "/path/to/token_label_data"
    for place in ("/path/to/imagenet", "/path/to/token_label_data"):
        assert any(warning.startswith(f"{place} is not on") for warning in warnings)


def test_finetuning_at_512_pixels(capfd: pytest.CaptureFixture[str]) -> None:
    settings, properties, warnings = dry_run(FINETUNE, capfd)
    assert properties["model"] == "volo_d5, 296,091,488 parameters, 512 px"
    assert properties["batch"] == "32 images per step = 8 ranks x 4 images x 1 micro-batches"
    assert properties["lr"] == "peak 2.3e-05, as given by --lr"
    assert properties["length"] == "40 epochs x 40,036 steps = 1,601,440 steps (200,180 of warm-up)"
    assert settings["update"]["weight_decay"] == 1e-8
    assert settings["objective"]["ground_truth"] is True
    assert settings["model"]["finetune"] == "/path/to/pretrained_224_volo_d5/"
    # 24 labels per side belong to another image size, which is a warning.
    assert warnings[0].startswith("--token-label-size 24 does not fit --img-size 512")
    assert warnings[0].endswith("so 32 is used")


def test_under_a_launcher_one_rank_prints() -> None:
    result = run_entry(*arguments_of(PRETRAIN), "--dry-run", ranks=2, start_with="gloo")
    assert result.status == 0, result.output
    printed = [line.removeprefix("[0]<stdout>:") for line in result.lines if line.startswith("[0]<stdout>:")]
    assert not any(line.startswith("[1]") for line in result.lines)
    _, properties, _ = parse_dry_run(printed)
    assert properties["ranks"] == "2"
    assert properties["batch"] == "88 images per step = 2 ranks x 44 images x 1 micro-batches"
    assert sum("images per step" in line for line in result.lines) == 1


def test_the_plain_transformer_of_token_labels(capfd: pytest.CaptureFixture[str]) -> None:
    settings, properties, warnings = dry_run(LVVIT, capfd)
    assert properties["model"] == "lvvit_s, 26,151,824 parameters, 224 px"
    assert properties["lr"] == "peak 0.0016 = 0.0016 x 1024 / 1024"
    assert settings["update"]["ema_decay"] == 0.99992
    # Flags that are left out have the defaults of TokenLabeling's main.py, not VOLO's.
    assert settings["update"]["warmup_epochs"] == 5
    assert settings["objective"]["dense_weight"] == 1.0
    assert properties["length"] == "310 epochs x 1,251 steps = 387,810 steps (6,255 of warm-up)"
    assert not any("images per step" in warning for warning in warnings)
    settings, properties, warnings = dry_run(LVVIT_FINETUNE, capfd)
    assert properties["model"] == "lvvit_s, 26,297,744 parameters, 384 px"
    assert properties["lr"] == "peak 5e-06, as given by --lr"
    assert settings["objective"]["token_label_size"] == 24
    # The recipe lvvit_s_384 has the same settings.
    recipe, recipe_properties, _ = dry_run(
        "horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet --recipe lvvit_s_384 "
        "--token-label-data /path/to/label_data --finetune /path/to/checkpoint --lr 5e-6 --precision fp16",
        capfd,
    )
    assert recipe_properties == properties
    replaced_by_lr = ("lr_base", "lr_base_size")
    for group in ("model", "data", "objective", "update"):
        assert {
            name: (value, settings[group][name])
            for name, value in recipe[group].items()
            if value != settings[group][name] and name not in replaced_by_lr
        } == ({"token_label_size": (0, 24)} if group == "objective" else {})


def test_without_lr_the_scaled_learning_rate_is_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings, properties, warnings = dry_run(LVVIT_TRANSFER, capfd)
    assert settings["objective"]["dense_weight"] == 0.0
    assert properties["lr"].startswith("peak 0.0008 = 0.0016 x 512 / 1024; ")
    assert any("(--lr 0.0016: not scaled)" in warning for warning in warnings)
