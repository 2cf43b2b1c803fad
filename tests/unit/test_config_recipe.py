"""The command line is the schema; recipes are read as they were written; default < recipe < flag."""

from pathlib import Path
from typing import Any

import pytest
from schema_examples import COMPANIONS, FIELDS, NAMES, examples, recipe_of, value_of, words

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive
from horovod_volo.config.recipe import assemble, dump, load_recipe
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.errors import UserError

ODD = [
    "plain",
    " leading and trailing ",
    "quotes \" and ' and \"\"\" and '''",
    "back\\slash, \\n, \\u0041 and a last \\",
    "lines\nof\r\ntext\tand tabs",
    "# [table] = 1",
    "Größe 図 🦊 \u2028 \u0085",
    "\x00\x01\x1b\x1f\x7f\x80",
]


@pytest.mark.parametrize("text", ODD)
def test_every_setting_survives_being_written_and_read(text: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {}
    for _, name, default in FIELDS:
        other = examples(name, default)[0]
        chosen[name] = text if other == "one" else other
    written = assemble(chosen, fallback_name="")
    recipe = recipe_of(tmp_path, dump(written))
    assert load_recipe(recipe) == chosen
    read = assemble(load_recipe(recipe), fallback_name="")
    assert read == written
    assert dump(read) == dump(written)


@pytest.mark.parametrize("number", [0.1 + 0.2, 5e-324, 1e-5, 1e16, 1e22, 1.7976931348623157e308, 3.0])
def test_numbers_survive_to_the_bit(number: float, tmp_path: Path) -> None:
    written = assemble({"lr": number, "ratio": (number, number)}, fallback_name="")
    read = assemble(load_recipe(recipe_of(tmp_path, dump(written))), fallback_name="")
    assert read == written


@pytest.mark.parametrize("table", ["model", "exchange"])
def test_precision_is_read_from_its_table_and_from_the_one_it_was_in(table: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, f'[{table}]\nprecision = "bf16"\n')
    config = parse(["--recipe", recipe]).config
    assert config.model.precision == "bf16"
    written = dump(config)  # in its own table
    assert written.index("[model]") < written.index('precision = "bf16"') < written.index("[data]")
    both = '[exchange]\nprecision = "fp16"\n[model]\nprecision = "bf16"\n'
    assert parse(["--recipe", recipe_of(tmp_path, both)]).config.model.precision == "bf16"


def test_settings_that_were_removed_may_have_the_value_that_changes_nothing(tmp_path: Path) -> None:
    old = '[objective]\nclass_weights = ""\n[detection]\nhue = 9\nsaturation_range = [0.5, 1.5]\n'
    assert parse(["--recipe", recipe_of(tmp_path, old)]).config.detection.hue == 9
    with pytest.raises(UserError, match="unknown key 'class_weights'"):
        parse(["--recipe", recipe_of(tmp_path, old.replace('""', '"balanced"'))])


def test_removed_settings_that_changed_no_result_are_left_out_with_a_warning(tmp_path: Path) -> None:
    for value, warnings in (("", 0), ("line.json", 1)):
        old = f'[launch]\nbinding = "core"\nhorovod_timeline = "{value}"\n'
        config = parse(["--recipe", recipe_of(tmp_path, old)]).config
        assert config.launch.binding == "core"
        assert len(config_warnings(config)) == warnings


# What a recipe was published with


@pytest.mark.parametrize(
    ("name", "given", "lacking"),
    [
        ("volo_d1", "--token-label-data maps", ""),
        ("volo_d5_448", "", "with --token-label-data and --finetune and --ground-truth, which"),
        ("volo_d5_448", "--finetune w.pth --token-label-data maps", "published with --ground-truth, which"),
        # Whose published command mixes no true class.
        ("lvvit_s_384", "--token-label-data maps --finetune w.pth", ""),
        ("lvvit_l", "", "which this run lacks: do not expect the published accuracy"),
        ("imagenet22k_volo_d1", "", ""),
        ("demo", "", ""),
    ],
)
def test_a_run_without_what_its_recipe_was_published_with_is_noted(name, given, lacking, tmp_path):
    config = parse(["--recipe", name, *given.split()]).config
    noted = config_warnings(config)
    assert len(noted) == bool(lacking)
    assert lacking in "".join(noted)
    # Its resolved settings are a recipe that says the same.
    assert config_warnings(parse(["--recipe", recipe_of(tmp_path, dump(config))]).config) == noted


@pytest.mark.parametrize(
    ("text", "peak", "ends"),
    [
        # From before `lr_base_size`: the peak for 1024 images, the ends as they are.
        ("lr_base = 1.6e-05\nmin_lr = 4e-6\nwarmup_lr = 1e-6", 8e-6, (4e-6, 1e-6)),
        ("lr_base = 8e-6\nlr_base_size = 512\nmin_lr = 4e-6\nwarmup_lr = 1e-6", 8e-6, (4e-6, 1e-6)),
        ("lr_base = 8e-6\nlr_base_size = 1024\nmin_lr = 4e-6\nwarmup_lr = 1e-6", 4e-6, (2e-6, 5e-7)),
    ],
)
def test_a_recipe_without_the_batch_of_its_rates_means_what_it_meant(text, peak, ends, tmp_path):
    config = parse(["--recipe", recipe_of(tmp_path, f"[update]\n{text}\n"), "-b", "64"]).config
    derived = derive(config, ranks=8, images=10_000)
    assert (derived.peak_lr, (derived.min_lr, derived.warmup_lr)) == (peak, ends)


@pytest.mark.parametrize(("group", "name", "default"), FIELDS, ids=NAMES)
def test_a_flag_wins_over_a_recipe_and_a_recipe_over_the_default(group, name, default, tmp_path):
    in_recipe, by_flag = examples(name, default)
    lines = dump(assemble({name: in_recipe}, fallback_name="")).splitlines()
    line = next(line for line in lines if line.startswith(f"{name} = "))
    recipe = ["--recipe", recipe_of(tmp_path, f"[{group}]\n{line}\n"), *COMPANIONS.get(name, [])]
    assert value_of(parse(recipe).config, name) == in_recipe != default
    for argv in ([*recipe, *words(name, by_flag)], [*words(name, by_flag), *recipe]):
        assert value_of(parse(argv).config, name) == by_flag != in_recipe


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--apex-amp", "precision", "fp16"),
        ("-b 44", "batch_size", 44),
        ("--learning-rate 1e-3", "lr", 1e-3),
        ("--lr 1.0e-4", "lr", 1e-4),
        ("--no-mix-token", "mix_token", False),
        ("--token-label images", "data_dir", "images"),
        ("--scale .2 1", "scale", (0.2, 1.0)),
        ("--precision bf16 --amp", "precision", "bf16"),  # what is stated wins
        ("--plugin a.b,c", "plugin", "a.b,c"),
        ("--plugin a.b --plugin c", "plugin", "a.b,c"),
        # Other programs' flags
        ("--log-interval 7", "log_every", 7),
        ("--checkpoint_hist=7", "keep_checkpoints", 7),
        ("--model-ema-decay 0.5 --model-ema", "ema_decay", 0.5),
        ("--model-ema", "ema_decay", 0.99992),
        ("--amp-dtype bfloat16 --amp", "precision", "bf16"),
        ("--name float16", "name", "float16"),
        ("--sync-bn", "sync_bn", "all"),
        ("-vb 7", "eval_batch_size", 7),
        ("--sched-on-updates", "lr_changes", "step"),
        ("--input-size 3 96 96", "img_size", 96),
        ("--grad-checkpointing", "grad_checkpoint", True),
        ("--bce-loss", "loss", "bce"),
        ("--decay-milestones 30 60", "decay_milestones", "30,60"),
        ("--resume", "resume", "auto"),
        ("--data-path images", "data_dir", "images"),
        ("--model-kwargs drop_rate=0.3 layers=(1,2)", "model_kwargs", "drop_rate=0.3 layers=(1,2)"),
        ("--drop 0.3 --gp avg", "model_kwargs", "drop_rate=0.3 global_pool=avg"),
        ("--mixup 0.2", "mix_token", False),
    ],
)
def test_spellings(line: str, name: str, value: Any) -> None:
    found = value_of(parse(line.split()).config, name)
    assert (found, type(found)) == (value, type(value))


def test_flags_without_effect_are_named_in_one_warning() -> None:
    flags = "--pin-mem --worker-seeding all --dist-bn reduce --channels_last"
    (warning,) = parse(["images", *flags.split()]).config.warnings
    assert warning.startswith("--pin-mem, --worker-seeding, --dist-bn, --channels-last: without effect here")


def test_a_whole_number_in_a_recipe_will_do_for_a_float(tmp_path: Path) -> None:
    config = parse(["--recipe", recipe_of(tmp_path, "[update]\nlr = 1\n[data]\nscale = [1, 1]")]).config
    assert type(config.update.lr) is float
    assert [type(part) for part in config.data.scale] == [float, float]


def test_a_run_is_called_after_its_recipe_or_its_model(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "[update]\nlr = 1.0\n")
    assert parse(["--recipe", recipe]).config.run.name == "some"
    assert parse(["--recipe", "demo"]).config.run.name == "demo"
    assert parse(["--model", "volo_d4"]).config.run.name == "volo_d4"
    assert parse(["--recipe", recipe, "--name", "mine"]).config.run.name == "mine"


# Without a recipe: what the published code of the network's family has, where ours is another.


@pytest.mark.parametrize(
    ("argv", "batch", "warmup", "dense"),
    [
        ([], 128, 20, 0.5),
        (["--model", "resnet50", "--no-mix-token"], 128, 20, 0.5),  # no family
        (["--model", "lvvit_s"], 32, 5, 1.0),
        (["--dense-weight", "0", "--warmup-epochs", "20", "--model", "lvvit_s"], 32, 20, 0.0),
        (["--recipe", "volo_d1", "--model", "lvvit_s"], 128, 20, 0.5),  # a recipe states all it wants
        (["--recipe", "SOME", "--model", "lvvit_s"], 7, 20, 0.5),
    ],
)
def test_a_familys_default_stands_between_the_schemas_and_a_flag(argv, batch, warmup, dense, tmp_path):
    recipe = recipe_of(tmp_path, "[data]\nbatch_size = 7\n")
    config = parse([recipe if word == "SOME" else word for word in argv]).config
    found = (config.data.batch_size, config.update.warmup_epochs, config.objective.dense_weight)
    assert found == (batch, warmup, dense)
