"""Mistakes in flags and recipes are refused in one line that says what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from schema_examples import recipe_of

from horovod_volo.config.command_line import parse
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.errors import UserError

MAPS = ["--token-label", "--token-label-data", "maps"]


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as raised:
        parse(list(argv))
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--modle", "volo_d1"], "There is no flag --modle. Did you mean --model?"),
        (["images", "--batchsize=3"], "There is no flag --batchsize. Did you mean --batch-size?"),
        (["--token_label"], "Did you mean --token-label?"),
        (["--epoch", "3"], "There is no flag --epoch. Did you mean --epochs?"),  # no abbreviations
        (["--zzz"], "There is no flag --zzz."),
        (["images", "more"], "'more' is one argument too many"),
        (["--recipe", "dmo"], "There is no recipe 'dmo'. Did you mean demo? Recipes: "),
        (["--recipe", "nowhere/some.toml"], "nowhere/some.toml cannot be read: No such file or directory."),
        (["--ranks", "8"], "--ranks goes with --dry-run"),
        (["--dry-run", "--ranks", "-2"], "--ranks must be at least 1, not -2."),
    ],
)
def test_unknown_words_name_the_nearest(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


def test_what_is_near_to_nothing_gets_no_guess() -> None:
    assert "Did you mean" not in refusal("--zzz")
    assert "Did you mean" not in refusal("--recipe", "zzz")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--epochs", "ten"], "--epochs takes a whole number, not 'ten'."),
        (["--epochs", "1.5"], "--epochs takes a whole number, not '1.5'."),
        (["-b", "many"], "--batch-size takes a whole number, not 'many'."),
        (["--lr", "fast"], "--lr takes a number, not 'fast'."),
        (["--scale", "0.1", "x"], "--scale takes a number, not 'x'."),
        (["--scale", "0.1"], "expected 2 arguments"),
        (["--lr"], "expected one argument"),
        (
            ["--precision", "f16"],
            "--precision takes fp32 or tf32 or bf16 or fp16, not 'f16'. Did you mean fp16?",
        ),
        (["--mix-token=yes"], "ignored explicit argument 'yes'"),
        (["--batch-size", "0"], "--batch-size must be at least 1, not 0."),
        (["--drop-path", "1"], "--drop-path must be below 1, not 1.0."),
        (["--smoothing", "-0.1"], "--smoothing must be at least 0, not -0.1."),
        (["--ema-decay", "1.0"], "--ema-decay must be below 1"),
        (["--model-ema-warmup"], "--ema-warmup needs EMA weights. Add --ema-decay or --model-ema"),
        (["--bucket-mib", "0"], "--bucket-mib must be at least 0.001"),
        (["--lr", "nan"], "--lr takes a finite number"),
        (["--bucket-mib", "inf"], "--bucket-mib takes a finite number"),
        (["--ratio", "0.5", "inf"], "--ratio takes two numbers"),
    ],
)
def test_flags_of_the_wrong_type_or_range(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[update]\nepochs = "ten"', "update.epochs takes a whole number, not 'ten'."),
        ("[update]\nepochs = 1.5", "update.epochs takes a whole number, not 1.5."),
        ("[update]\nepochs = true", "update.epochs takes a whole number, not True."),
        ('[update]\nlr = "1e-3"', "update.lr takes a number, not '1e-3'."),
        ("[update]\nlr = true", "update.lr takes a number, not True."),
        ("[update]\nlr = inf", "update.lr takes a finite number, not inf."),
        ("[update]\nepochs = 0", "update.epochs must be at least 1, not 0."),
        ("[objective]\ntoken_label = 1", "objective.token_label takes true or false, not 1."),
        ("[data]\ndata_dir = 3", "data.data_dir takes text, not 3."),
        ("[data]\nscale = 0.5", "data.scale takes two numbers, not 0.5."),
        ("[data]\nscale = [0.1, 0.2, 0.3]", "data.scale takes two numbers"),
        ("[data]\nscale = [0.1, true]", "data.scale takes two numbers"),
        ("[exchange]\nprecision = 16", "exchange.precision takes fp32 or tf32 or bf16 or fp16, not 16."),
        ("[update]\nepoch = 3", "unknown key 'epoch' in [update]. Did you mean epochs?"),
        ("[update]\nbatch_size = 3", "unknown key 'batch_size' in [update]. It belongs to [data]."),
        (
            "[updates]\nepochs = 3",
            "unknown table [updates]. Did you mean update? Tables: run, launch, model, ",
        ),
        ("epochs = 3", "unknown table [epochs]."),
        ("[update\n", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_recipe(text: str, said: str, tmp_path: Path) -> None:
    path = recipe_of(tmp_path, text)
    message = refusal("--recipe", path)
    assert said in message
    assert path in message


def test_a_recipe_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(b'[run]\nname = "\xff"\n')
    assert "is not valid TOML" in refusal("--recipe", str(path))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--scale", "0.5", "0.2"], "--scale takes two numbers above 0 in ascending order, not 0.5 0.2."),
        (["--scale", "0", "1"], "--scale takes two numbers above 0"),
        (["--scale", "0.5", "1.5"], "--scale is a fraction of the image's area, at most 1, not 1.5."),
        (
            ["--mean", "124", "116", "104"],
            "--mean is for pixels from 0 to 1, so its numbers are from 0 to 1, not",
        ),
        (["--std", "0.5", "0", "0.5"], "its numbers are from above 0 to 1, not 0.5 0 0.5. Divide those of"),
        (
            ["--aa", "augmix", "--randaugment-on", "image"],
            "AugMix works on crops. Drop --randaugment-on image",
        ),
        (
            ["--aa", "augmix-m5", "--token-label", "--token-label-data", "maps"],
            "no label map describes that.",
        ),
        (["--balance", "1.5"], "--balance is at most 1"),
        (["--balance", "0.5", "--block-shuffle", "64"], "--block-shuffle reads each once. Drop one of them."),
        (["--balance", "0.5", "--class-weights", "balanced"], "both make rare classes count more. Drop one"),
        (["--class-weights", "balanced", "--loss", "own"], "--loss own does not read it. Drop it."),
        (["--ratio", "2", "1"], "--ratio takes two numbers above 0 in ascending order, not 2 1."),
        (["--hflip", "1.5"], "--hflip is a probability, at most 1, not 1.5."),
        (["--vflip", "2"], "--vflip is a probability"),
        (["--token-label-data", "maps"], "Add --token-label, or drop --token-label-data."),
        (["--token-label", "--ground-truth"], "Add --token-label-data, or drop --ground-truth."),
        (["--epochs", "10", "--warmup-epochs", "20"], "--warmup-epochs 20 is longer than --epochs 10"),
        (["--lr-base", "0"], "The learning rate is 0. Set --lr, or --lr-base"),
        (
            ["--decay-milestones", "60,30"],
            "takes ascending epochs from 1 to 299, one less than --epochs,",
        ),
        (["--decay-milestones", "30,300"], "such as 30,60,80, not '30,300'."),
        (["--decay-milestones", "30,,60"], "not '30,,60'."),
        (["--decay-milestones", "0"], "not '0'."),
        (
            [*MAPS, "--bce-target-threshold", "0.2"],
            "label maps are no such targets. Drop it, or --token-label",
        ),
        (["--cycle-up", "0.6"], "--cycle-up 0.6 leaves too few epochs to come down again: it is at most 0.5"),
    ],
)
def test_settings_that_contradict_each_other(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--scale", "1", "1"],
        ["--ratio", "1", "1"],
        ["--hflip", "1"],
        ["--warmup-epochs", "300"],
        ["--lr-base", "0", "--lr", "1e-3"],
        ["--token-label", "--token-label-data", "maps", "--ground-truth"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(argv: list[str]) -> None:
    assert isinstance(parse(argv).config, Config)


# Settings that the others leave without effect: what is stated, why it is idle, and what gives it an effect.
ONE_CYCLE = "with --sched one-cycle, which rises by itself (--cycle-up, --cycle-start)"
WITHOUT_EFFECT = [
    (["--momentum", "0.8"], "with --opt adamw", ["--opt", "lars"]),
    (["--lr-base", "1e-3"], "with --lr", ["--lr", "0"]),
    (["--lr-base-size", "512"], "with --lr", ["--lr", "0"]),
    (["--warmup-lr", "1e-5"], "with --warmup-epochs 0", ["--warmup-epochs", "3"]),
    (["--warmup-prefix"], "with --warmup-epochs 0", ["--warmup-epochs", "3"]),
    (["--clip-mode", "value"], "without --clip-grad", ["--clip-grad", "1"]),
    (["--mixup-prob", "0.5"], "without --mixup or --cutmix", ["--cutmix", "1", "--no-mix-token"]),
    (
        ["--mixup-switch-prob", "0.7"],
        "without both --mixup and --cutmix",
        ["--mixup", "1", "--cutmix", "1", "--no-mix-token"],
    ),
    (["--decay-milestones", "30"], "without --sched step", ["--sched", "step"]),
    (["--decay-rate", "0.2"], "without --sched step", ["--sched", "step"]),
    (["--poly-power", "2"], "without --sched poly", ["--sched", "poly"]),
    (["--cycle-up", "0.3"], "without --sched one-cycle", ["--sched", "one-cycle"]),
    (["--cycle-start", "0.1"], "without --sched one-cycle", ["--sched", "one-cycle"]),
    (["--warmup-epochs", "5"], ONE_CYCLE, ["--sched", "cosine"]),
    (["--warmup-lr", "2e-6"], ONE_CYCLE, ["--sched", "cosine"]),
    (["--warmup-prefix"], ONE_CYCLE, ["--sched", "cosine"]),
    (["--dense-weight", "2"], "without --token-label", ["--token-label"]),
    (["--token-label-size", "14"], "without --token-label", ["--token-label"]),
    (["--bce-target-threshold", "0.2"], "without --loss bce", ["--loss", "bce"]),
    (["--label-geometry", "reference"], "without --token-label-data", MAPS),
    (["--remode", "rand"], "with --reprob 0", ["--reprob", "0.5"]),
    (["--recount", "2"], "with --reprob 0", ["--reprob", "0.5"]),
    (["--color-jitter", "0.3"], "with --aa rand-m9-mstd0.5-inc1", ["--aa", ""]),
    (["--randaugment-on", "image"], "without --aa or --color-jitter", ["--color-jitter", "0.4"]),
    (["--shuffle-window", "32"], "without --block-shuffle", ["--block-shuffle", "100"]),
    (["--bad-samples-limit", "3"], "with --bad-samples fail", ["--bad-samples", "skip"]),
]
# What takes the effect away where the defaults do not.
IDLE_BY = {
    "with --lr": ["--lr", "1e-3"],
    ONE_CYCLE: ["--sched", "one-cycle"],
    "with --warmup-epochs 0": ["--warmup-epochs", "0"],
    "with --reprob 0": ["--reprob", "0"],
    "without --aa or --color-jitter": ["--aa", "", "--color-jitter", "0"],
    "with --bad-samples fail": ["--bad-samples", "fail"],
}


@pytest.mark.parametrize(("stated", "why", "remedy"), WITHOUT_EFFECT, ids=lambda value: value[0])
def test_a_setting_without_effect_is_named(
    stated: list[str], why: str, remedy: list[str], tmp_path: Path
) -> None:
    idle = IDLE_BY.get(why, [])
    warning = f"{stated[0]} has no effect {why}"
    assert warning in config_warnings(parse([*stated, *idle]).config)
    assert warning not in config_warnings(parse(idle).config)  # nobody stated it
    assert warning not in config_warnings(parse([*stated, *idle, *remedy]).config)
    # A recipe that states it is warned of too, as is the run's own resolved.toml.
    recipe = recipe_of(tmp_path, dump(parse([*stated, *idle]).config))
    assert warning in config_warnings(parse(["--recipe", recipe]).config)


def test_what_a_recipe_states_is_warned_of_unless_it_is_the_default(tmp_path: Path) -> None:
    by_default = recipe_of(tmp_path, dump(Config()))
    assert config_warnings(parse(["--recipe", by_default]).config) == []
    divided = recipe_of(tmp_path, "[update]\naccumulation = 2\n[data]\nglobal_batch = 64\n")
    assert config_warnings(parse(["--recipe", divided]).config) == [
        "--accumulation has no effect with --global-batch, which sets it"
    ]
