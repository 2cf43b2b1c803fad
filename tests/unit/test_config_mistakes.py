"""Mistakes in flags and recipes are refused in one line that says what to type instead; and the help."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from schema_examples import MAPS, recipe_of

from horovod_volo import evaluate, export, labels, pack
from horovod_volo.config.arguments import _FOREIGN as HINTS
from horovod_volo.config.arguments import hint
from horovod_volo.config.command_line import build_parser, parse
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.doctor import __main__ as doctor


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as raised:
        parse(list(argv))
    text = str(raised.value)
    assert "\n" not in text
    return text


# A command line, and what its error must name: the flag or file, and the remedy.
MISTAKES = [
    # Unknown words
    ("images --batchsize=3", "--batchsize", "Did you mean --batch-size?"),
    ("--epoch 3", "Did you mean --epochs?"),  # no abbreviations
    ("images more", "'more' is one argument too many"),
    ("--recipe dmo", "'dmo'", "Did you mean demo?", "Recipes: "),
    ("--recipe nowhere/some.toml", "nowhere/some.toml cannot be read"),
    ("--recipe args.yaml", "'args.yaml'", "NAME.toml", "--dry-run"),
    ("--ranks -2", "--ranks takes a whole number of at least 0, not '-2'; or auto"),
    # Types and bounds
    ("--epochs ten", "--epochs takes a whole number", "'ten'"),
    ("--lr fast", "--lr takes a number"),
    ("--precision f16", "--precision takes fp32 or tf32 or bf16 or fp16", "Did you mean fp16?"),
    ("--batch-size 0", "--batch-size", "at least 1"),
    ("--drop-path 1", "--drop-path", "below 1"),
    ("--lr nan", "--lr takes a finite number"),
    ("--ratio 0.5 inf", "--ratio takes two numbers"),
    ("--scale 0.5 0.2", "--scale", "ascending order", "0.5 0.2"),
    ("--scale 0 1", "--scale takes two numbers above 0"),
    ("--scale 0.5 1.5", "--scale", "at most 1"),
    ("--mean 124 116 104", "--mean", "from 0 to 1", "Divide"),
    ("--std 0.5 0 0.5", "--std", "above 0", "0.5 0 0.5"),
    ("--decay-milestones 60,30", "--decay-milestones", "ascending epochs from 1 to 299"),
    ("--decay-milestones 30,300", "'30,300'"),
    ("--decay-milestones 30,,60", "'30,,60'"),
    ("--log-to wandb", "--log-to", "callback"),
    ("--name ../other", "--name ../other leaves --output"),
    ("https://me:secret@host/x", "password", "~/.netrc"),
    # Contradictions
    ("--model-ema-warmup", "--ema-warmup needs --ema-decay"),
    ("--use-ema", "--use-ema needs --finetune"),
    ("--allow-mismatch head", "--allow-mismatch needs --finetune"),
    ("--token-label-data maps", "Add --token-label, or drop --token-label-data"),
    ("--token-label --ground-truth", "Add --token-label-data, or drop --ground-truth"),
    ("--map-geometry whole", "Add --token-label-data, or drop --map-geometry"),
    (
        f"{MAPS} --map-geometry centre-crop:9:9 --label-geometry reference",
        "Drop it, or --map-geometry centre",
    ),
    (f"{MAPS} --bce-target-threshold 0.2", "Drop it, or --token-label-data"),
    ("--mixup 0.8 --mix-token", "Add --no-mix-token, or drop --mixup"),
    ("--mixup 0.8 --no-mix-token --mixup-prob 2", "--mixup-prob"),
    ("--cutmix 1 --no-mix-token --token-label", "drop --token-label"),
    ("--balance 0.5 --block-shuffle 64", "--balance", "--block-shuffle", "Drop one"),
    ("--epochs 10 --warmup-epochs 20", "--warmup-epochs 20", "--epochs 10", "--warmup-prefix"),
    ("--lr-base 0", "The learning rate is 0. Set --lr, or --lr-base"),
    ("--shard-optimizer --clip-mode agc --clip-grad 1", "Use --clip-mode norm"),
    ("--model volo_d1 --elastic --shard-optimizer", "Drop --shard-optimizer, or --elastic"),
    ("flowers --elastic --global-batch 64", "--elastic and --reproducible need a --recipe or --model"),
    ("--horovod-autotune log", "HOROVOD_AUTOTUNE=1"),
    ("--input-size 1 96 96", "3 N N"),
    ("--model-kwargs drop_rate", "NAME=VALUE"),
    ("--decay-epochs 5 --decay-milestones 5", "Drop one"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[0])
def test_a_mistake_on_the_command_line_names_the_flag_and_the_remedy(case: tuple[str, ...]) -> None:
    argv, *said = case
    message = refusal(*argv.split())
    assert [text for text in said if text not in message] == []


EDGES = (
    "--scale 1 1",
    "--hflip 1",
    "--epochs 300 --warmup-epochs 300",
    "--lr-base 0 --lr 1e-3",
    f"{MAPS} --ground-truth",
)


@pytest.mark.parametrize("argv", EDGES)
def test_the_edge_of_a_rule_is_allowed(argv: str) -> None:
    assert isinstance(parse(argv.split()).config, Config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[update]\nepochs = "ten"', "update.epochs takes a whole number, not 'ten'."),
        ("[update]\nepochs = true", "update.epochs takes a whole number, not True."),
        ("[objective]\ntoken_label = 1", "objective.token_label takes true or false, not 1."),
        ("[data]\nscale = 0.5", "data.scale takes two numbers"),
        ("[data]\nscale = [0.1, true]", "data.scale takes two numbers"),
        ("[exchange]\nprecision = 16", "exchange.precision takes fp32 or tf32 or bf16 or fp16, not 16."),
        ("[update]\nepoch = 3", "unknown key 'epoch' in [update]. Did you mean epochs?"),
        ("[update]\nbatch_size = 3", "unknown key 'batch_size' in [update]. It belongs to [data]."),
        ("[updates]\nepochs = 3", "unknown table [updates]. Did you mean update? Tables: run, launch, model"),
        ("[update\n", "is not valid TOML"),
        ('[run]\nname = "\udcff"\n', "is not valid TOML"),
        ("[published]\ntop = 84.2", "[published] takes top1, a number"),
        ('[published]\nneeds = ["finetuning"]', "needs, names of settings"),
    ],
)
def test_mistakes_in_a_recipe(text: str, said: str, tmp_path: Path) -> None:
    path = recipe_of(tmp_path, text)
    message = refusal("--recipe", path)
    assert said in message
    assert path in message


# The function of each command, and the arguments before the flags in question.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "evaluate": (evaluate.main, "images --weights run"),
    "evaluate images": (evaluate.main, "images"),
    "labels": (labels.main, ""),
    "labels show": (labels.main, "show store images 0 out.png"),
    "export": (export.main, "run folder"),
    "pack": (pack.main, "images packed"),
    "doctor": (doctor.main, ""),
}


# A command, flags, and what its error must name: the flag, and the remedy.
MISTAKES_OF_COMMANDS = [
    ("evaluate", "--weight run", "--weight.", "Did you mean --weights?"),  # no abbreviations
    ("evaluate images", "--wieghts run", "There is no flag --wieghts. Did you mean --weights?"),
    ("evaluate images", "", "required: --weights"),
    ("labels show", "--hepl", "--hepl", "Did you mean --help?"),
    ("labels", "improt maps store", "COMMAND", "'improt'. Did you mean import?"),
    ("doctor", "--sharde runs", "--sharde", "Did you mean --shared?"),
    ("labels show", "more", "'more' is one argument too many", "STORE, DATA_DIR, NAME_OR_INDEX, OUT.png"),
    ("evaluate", "--split tran", "--split", "'tran'", "Did you mean train?"),
    ("evaluate", "--per-class few", "--per-class", "at least 1", "'few'", "all"),
    ("evaluate", "--v2 --split val", "--split", "not allowed with argument --v2"),
    ("export", "--img-size 31", "--img-size must be at least 32"),
    ("export", "--batch 0", "--batch", "at least 1", "dynamic"),
    ("pack", "--quality 101", "--quality must be below 101"),
    ("pack", "--shard-images 3 --shard-size-mb 256", "--shard-size-mb", "not allowed with argument"),
    ("pack", "more", "DATA_DIR and OUT_DIR", "--verify or --catalog"),
]


@pytest.mark.parametrize("case", MISTAKES_OF_COMMANDS, ids=lambda case: " ".join(case[:2]))
def test_a_mistake_names_the_flag_and_the_remedy(case, capsys):
    command, flags, *said = case
    main, accepted = COMMANDS[command]
    assert main([*accepted.split(), *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert [text for text in said if text not in printed.err] == []


FLAGS = set(build_parser()._option_string_actions)


def test_the_short_help_fits_on_a_screen_and_its_examples_are_read(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse(["-h"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 80
    pattern = r"^  (?:horovodrun -np 8 )?horovod-volo train (.*?)(?:    .*)?$"
    examples = re.findall(pattern, printed, re.MULTILINE)
    assert len(examples) == 4
    assert "horovod_volo." not in printed
    for example in examples:
        parse(example.replace("--token-label-data", "--token-label --token-label-data").split())


@pytest.mark.parametrize(
    ("argv", "epochs", "width"),
    [
        ("--help-all", "default: chosen", "chosen"),
        ("--epochs 7 --help-all --recipe volo_d5_512 --use-ema", "default: 30", "512"),  # a contradiction
        ("--epochs 7 --help-all --model volo_d2", "given: 7", "224"),
    ],
)
def test_the_help_shows_the_values_that_a_run_would_have(argv, epochs, width, capsys):
    with pytest.raises(SystemExit):
        parse(argv.split())
    printed = " ".join(capsys.readouterr().out.split())
    assert f"with --fit-head: none ({epochs})" in printed
    assert f"evaluation images, pixels (default: {width})" in printed


def test_a_hint_names_flags_that_there_are_for_one_that_there_is_not() -> None:
    assert set(re.findall(r"--[a-z][a-z-]*", " ".join(HINTS.values()))) <= FLAGS
    assert not FLAGS & set(" ".join(HINTS).split())
    for spelled in ("--nproc-per-node", "--nproc_per_node", "--pretrained", "-c"):  # torchrun has both
        text = hint(spelled.replace("_", "-"))
        with pytest.raises(UserError, match=re.escape(f"There is no flag {spelled}. {text}")):
            parse(["images", spelled])
    for other in ("-n", "--jsd", "--lr-k-decay", "--split-bn"):  # no guess, which would change something else
        with pytest.raises(UserError, match=rf"There is no flag {other}\. docs/migration.md"):
            parse(["images", other])
