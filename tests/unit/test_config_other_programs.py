"""Command lines of sail-sg/volo, TokenLabeling and timm are parsed, and mean the same."""

from __future__ import annotations

from typing import Any

import pytest
from schema_examples import value_of

from horovod_volo.config.command_line import _CHOSEN, parse
from horovod_volo.config.schema import all_settings
from horovod_volo.core.errors import UserError
from horovod_volo.engine.open_settings import DeviceFacts, choose_settings

# From the README of each repository, and the page on training scripts in timm's documentation.
PUBLISHED = """
/imagenet --model volo_d1 --img-size 224 -b 128 --lr 1.6e-3 --drop-path 0.1 --apex-amp
--token-label --token-label-size 14 --token-label-data labels

/imagenet --model volo_d1 --img-size 384 -b 64 --lr 8.0e-6 --min-lr 4.0e-6 --drop-path 0.1 --epochs 30
--apex-amp --weight-decay 1.0e-8 --warmup-epochs 5 --ground-truth --token-label --token-label-size 24
--token-label-data labels --finetune weights

/imagenet --model lvvit_s -b 256 --apex-amp --img-size 224 --drop-path 0.1 --token-label
--token-label-data labels --token-label-size 14 --model-ema

/imagenet --model lvvit_s -b 64 --apex-amp --img-size 384 --drop-path 0.1 --token-label
--token-label-data labels --token-label-size 24 --lr 5.e-6 --min-lr 5.e-6 --weight-decay 1.e-8 --finetune w

/dataset --model lvvit_s -b 64 --apex-amp --img-size 224 --drop-path 0.1 --token-label --token-label-size 14
--dense-weight 0.0 --num-classes 10 --finetune w

--data-dir /imagenet --model seresnet34 --sched cosine --epochs 150 --warmup-epochs 5 --lr 0.4 --reprob 0.5
--remode pixel --batch-size 256 --amp -j 4

--data-dir /imagenet --model resnext50_32x4d --lr 0.6 --warmup-epochs 5 --epochs 240 --weight-decay 1e-4
--sched cosine --reprob 0.4 --recount 3 --remode pixel --aa rand-m7-mstd0.5-inc1 -b 192 -j 6 --amp
--dist-bn reduce
"""


@pytest.mark.parametrize("line", PUBLISHED.split("\n\n"))
def test_a_published_command_line_is_parsed(line: str) -> None:
    parse(line.split())


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--log-interval 7", "log_every", 7),
        ("--checkpoint_hist=7", "keep_checkpoints", 7),
        ("--model-ema --model-ema-decay 0.5", "ema_decay", 0.5),
        ("--model-ema-decay 0.5 --model-ema", "ema_decay", 0.5),
        ("--model-ema", "ema_decay", 0.99992),
        ("--amp-dtype bfloat16 --amp", "precision", "bf16"),
        ("--sync-bn", "sync_bn", "all"),
        ("--sync-bn heads", "sync_bn", "heads"),
        ("-vb 7", "eval_batch_size", 7),
        ("--num-workers 7", "workers", 7),
        ("--sched-on-updates", "lr_changes", "step"),
        ("--input-size 3 96 96", "img_size", 96),
        ("--grad-checkpointing", "grad_checkpoint", True),
        ("--bce-loss", "loss", "bce"),
        ("--experiment mine", "name", "mine"),
        ("--decay-milestones 30 60", "decay_milestones", "30,60"),
        ("--resume", "resume", "auto"),
        ("--data-path images", "data_dir", "images"),
        ("--model-kwargs drop_rate=0.3 layers=(1,2)", "model_kwargs", "drop_rate=0.3 layers=(1,2)"),
        ("--mixup 0.2", "mix_token", False),
    ],
)
def test_a_flag_of_another_program_sets_the_setting_of_its_meaning(line: str, name: str, value: Any) -> None:
    config = parse(["--model", "volo_d1", *line.split()]).config
    assert value_of(config, name) == value
    assert config.warnings == () or name == "mix_token"


def test_flags_without_effect_are_named_in_one_warning() -> None:
    (warning,) = parse(["images", "--pin-mem", "--worker-seeding", "all", "--channels_last"]).config.warnings
    assert warning.startswith("--pin-mem, --worker-seeding, --channels-last: without effect here")


@pytest.mark.parametrize("line", ["--input-size 1 96 96", "--model-kwargs drop_rate", "--drop 0.3", "--jsd"])
def test_what_means_something_else_is_refused(line: str) -> None:
    with pytest.raises(UserError, match=r"3 N N|NAME=VALUE|--model-kwargs drop_rate=X|docs/migration.md"):
        parse(line.split())


def test_every_setting_that_may_be_chosen_is_shown_so() -> None:
    before = parse([]).config
    for device in (DeviceFacts("cpu"), DeviceFacts("cuda", 80.0, has_bf16=True)):
        chosen = choose_settings(before, 5_000, 2, device)
        changed = {item.name for item in all_settings() if item.value_in(chosen) != item.value_in(before)}
        assert {"lr_base"} <= changed <= _CHOSEN
