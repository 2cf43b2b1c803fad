"""Every command of docs/cluster.md is run by a test or needs the cluster; trainings are published ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.validation import config_warnings
from tests.documents import ROOT, commands_in, text_of

CLUSTER_TESTS = "".join(file.read_text() for file in sorted((ROOT / "tests/cluster").glob("test_*.py")))
SCRIPT = re.compile(r"jobs/[\w.]+\.(?:sbatch|sh)")
MARK = "# on the cluster"
SOURCED = ("env.sh", "over_ssh.sh", "under_slurm.sh")
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
    words = shlex.split(command)
    if "horovod_volo.train" in words:
        return [words[words.index("horovod_volo.train") + 1 :]]
    script = next(number for number, word in enumerate(words) if TRAINING.search(word))
    name, (recipe, *rest) = Path(words[script]).stem, words[script + 1 :]
    if name == "finetune":
        rest = ["--finetune", *rest]
    if name == "elastic":
        assert rest == [rest[0], "3"]
        assert all(
            int(rest[0]) % (8 * nodes) == 0 for nodes in (5, 4, 3)
        )  # it keeps its batch on fewer nodes
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
