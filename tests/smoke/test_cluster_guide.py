"""The commands of docs/cluster.md are run or published trainings; published command lines are accepted."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.validation import config_warnings
from horovod_volo.train import main
from tests.documents import ROOT, commands_in, text_of

CLUSTER_TESTS = "".join(file.read_text() for file in sorted((ROOT / "tests/cluster").glob("test_*.py")))
SCRIPT = re.compile(r"jobs/[\w.]+\.(?:sbatch|sh)")
MARK = "# on the cluster"
SOURCED = ("activate.sh", "env.sh", "over_ssh.sh", "under_slurm.sh")
COMMANDS = [command for command in commands_in(text_of("docs/cluster.md")) if MARK not in command]
TRAINING = re.compile(r"jobs/(pretrain|finetune|coarse_to_fine|elastic|horovodrun|mpirun)\.")
TRAINING_COMMANDS = [command for command in COMMANDS if TRAINING.search(command)] + [
    command for command in commands_in(text_of("README.md")) if "/path/to/imagenet" in command
]


def test_every_command_and_every_job_script_is_run() -> None:
    """tests/cluster runs the scripts, and tests/faults/test_doctor.py the doctor under each launcher."""
    others = [command for command in COMMANDS if "horovod_volo.doctor" not in command]
    assert len(others) > 5
    for command in others:
        (script,) = (script for script in SCRIPT.findall(command) if script != "jobs/env.sh")
        assert (ROOT / script).is_file(), command
        assert Path(script).name in CLUSTER_TESTS, command
    for script in sorted((ROOT / "jobs").glob("*.s*")):
        if "not run" not in script.read_text():
            assert script.name in CLUSTER_TESTS or script.name in SOURCED, script.name


def ranks_of(command: str) -> int:
    if found := re.search(r"-np (\d+)|--ranks (\d+)", command):
        return int(found[1] or found[2])
    nodes = re.search(r"--nodes=(\d+)", command)
    return 8 * (int(nodes[1]) if nodes else 2)


def trainings_of(command: str, ranks: int) -> list[list[str]]:
    """Return the flags of each training that a command starts, without those that jobs/env.sh adds."""
    if found := re.search(r"horovod.volo[. ]train (.*)", command):
        return [shlex.split(found[1])]
    words = shlex.split(command)
    script = next(number for number, word in enumerate(words) if TRAINING.search(word))
    name, (recipe, *rest) = Path(words[script]).stem, words[script + 1 :]
    if name == "finetune":
        rest = ["--finetune", *rest]
    if name == "elastic":
        assert rest == [rest[0], "3"]
        assert all(int(rest[0]) % (8 * nodes) == 0 for nodes in (5, 4, 3))  # each keeps its batch
        rest = ["--batch-size", str(int(rest[0]) // ranks)]
    chains = [["--recipe", recipe, *rest]]
    if name == "coarse_to_fine":
        fine, *rest = rest
        stages = rest.index("--coarse"), rest.index("--fine")
        second = ["--finetune", "coarse", *rest[stages[1] + 1 :]]
        chains = [["--recipe", recipe, *rest[stages[0] + 1 : stages[1]]], ["--recipe", fine, *second]]
    return [[*flags, "--token-label-data", "maps"] for flags in chains]


@pytest.mark.parametrize("command", TRAINING_COMMANDS)
def test_a_training_command_has_all_inputs_of_the_published_run_and_nearly_its_batch(command: str) -> None:
    ranks = ranks_of(command)
    for flags in trainings_of(command, ranks):
        config = resolve(parse(flags).config, ranks)
        assert config.published.needs
        assert config_warnings(config) == []
        batch = derive(config, ranks=ranks, images=1_281_167).global_batch
        assert batch == pytest.approx(config.update.lr_base_size, rel=0.07)


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


# What the dry run of each on 8 ranks shows: settings, beginnings of properties, and of warnings.
EXPECTED: list[tuple[str, dict[str, Any], dict[str, str], list[str]]] = [
    (
        PRETRAIN,
        {"drop_path": 0.75, "token_label_data": "/path/to/token_label_data"},
        {
            "ranks": "8",
            "model": "volo_d5, 295,455,584 parameters, 224 px",
            "images": "1,281,167 of 1,000 classes",
            "batch": "352 images per step = 8 ranks x 44 images x 1 micro-batches",
            "lr": "peak 0.0001, as given by --lr",
            "length": "310 epochs x 3,639 steps = 1,128,090 steps (72,780 of warm-up)",
            "precision": "fp16; ",
        },
        ["/path/to/imagenet is not on", "/path/to/token_label_data is not on"],
    ),
    (
        FINETUNE,
        {"weight_decay": 1e-8, "ground_truth": True, "finetune": "/path/to/pretrained_224_volo_d5/"},
        {
            "model": "volo_d5, 296,091,488 parameters, 512 px",
            "batch": "32 images per step = 8 ranks x 4 images x 1 micro-batches",
            "lr": "peak 2.3e-05, as given by --lr",
            "length": "40 epochs x 40,036 steps = 1,601,440 steps (200,180 of warm-up)",
        },
        # 24 labels per side belong to another image size.
        ["--token-label-size 24 does not fit --img-size 512"],
    ),
    (
        LVVIT,
        # Flags that are left out have the defaults of TokenLabeling's main.py, not VOLO's.
        {"ema_decay": 0.99992, "warmup_epochs": 5, "dense_weight": 1.0},
        {
            "model": "lvvit_s, 26,151,824 parameters, 224 px",
            "lr": "peak 0.0016 = 0.0016 x 1024 / 1024",
            "length": "310 epochs x 1,251 steps = 387,810 steps (6,255 of warm-up)",
        },
        [],
    ),
    (
        LVVIT_FINETUNE,
        {"token_label_size": 24},
        {"model": "lvvit_s, 26,297,744 parameters, 384 px", "lr": "peak 5e-06, as given by --lr"},
        [],
    ),
    (
        LVVIT_TRANSFER,
        {"dense_weight": 0.0},
        {"lr": "peak 0.0008 = 0.0016 x 512 / 1024; "},
        ["(--lr 0.0016: not scaled)"],
    ),
]


def arguments_of(command: str) -> list[str]:
    launch = "horovodrun -np 8 python -m horovod_volo.train "
    assert command.strip().startswith(launch)
    return shlex.split(command.replace("\\\n", " ").partition(launch)[2])


def dry_run(
    command: str, streams: pytest.CaptureFixture[str], ranks: int = 8
) -> tuple[dict[str, dict[str, Any]], dict[str, str], list[str]]:
    """Split the output of a dry run into settings by their groups, properties and warnings."""
    assert main([*arguments_of(command), "--dry-run", "--ranks", str(ranks)]) == 0
    lines = streams.readouterr().out.splitlines()
    first_property = next(number for number, line in enumerate(lines) if line.startswith("     ranks  "))
    properties = [(line[:10].strip(), line[12:]) for line in lines[first_property:]]
    warnings = [text for name, text in properties if name == "warning"]
    return tomllib.loads("\n".join(lines[:first_property])), dict(properties), warnings


@pytest.mark.parametrize(("command", "settings", "properties", "warnings"), EXPECTED)
def test_a_published_command(command, settings, properties, warnings, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups, shown, warned = dry_run(command, capfd)
    assert list(tmp_path.iterdir()) == []
    flat = {name: value for group in groups.values() for name, value in group.items()}
    assert {name: flat[name] for name in settings} == settings
    assert [name for name, begin in properties.items() if not shown[name].startswith(begin)] == []
    assert [begin for begin in warnings if not any(begin in warning for warning in warned)] == []
    assert any("(--lr 0.0016: not scaled)" in each for each in warned) == (command == LVVIT_TRANSFER)


def test_under_a_launcher_one_rank_prints(capfd, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert main([*arguments_of(LVVIT), "--dry-run"]) == 0
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("HOROVOD_RANK", "0")
    batch = dry_run(LVVIT, capfd, 0)[1]["batch"]
    assert batch == "256 images per step = 2 ranks x 128 images x 1 micro-batches"


def test_a_recipe_has_the_settings_of_a_published_command(capfd: pytest.CaptureFixture[str]) -> None:
    settings, properties, _ = dry_run(LVVIT_FINETUNE, capfd)
    recipe, recipe_properties, _ = dry_run(
        "horovodrun -np 8 python -m horovod_volo.train /path/to/imagenet --recipe lvvit_s_384 "
        "--token-label-data /path/to/label_data --finetune /path/to/checkpoint --lr 5e-6 --precision fp16",
        capfd,
    )
    assert recipe_properties == properties
    different = {
        name: (value, settings[group][name])
        for group in ("model", "data", "objective", "update")
        for name, value in recipe[group].items()
        if value != settings[group][name] and name not in ("lr_base", "lr_base_size")  # replaced by --lr
    }
    assert different == {"token_label_size": (0, 24)}
