"""Every command of docs/cluster.md is run by a test, or marked as one that needs the cluster."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from horovod_volo.config.command_line import parse
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.validation import config_warnings
from tests.ranks.launching import run

ROOT = Path(__file__).parents[2]
CLUSTER_TESTS = "".join(file.read_text() for file in sorted((ROOT / "tests/cluster").glob("test_*.py")))
SCRIPT = re.compile(r"jobs/[\w.]+\.(?:sbatch|sh)")
MARK = "# on the cluster"
SOURCED = ("env.sh", "over_ssh.sh", "under_slurm.sh")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/cluster.md").read_text(), flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


DOCTOR_COMMANDS = [
    command for command in commands() if "horovod_volo.doctor" in command and MARK not in command
]


def test_every_command_is_run_or_marked() -> None:
    others = [command for command in commands() if MARK not in command and command not in DOCTOR_COMMANDS]
    assert len(others) > 5
    for command in others:
        scripts = [script for script in SCRIPT.findall(command) if script != "jobs/env.sh"]
        assert len(scripts) == 1, command
        assert (ROOT / scripts[0]).is_file(), command
        # tests/cluster runs it, in a Slurm cluster or on several hosts on this machine.
        assert Path(scripts[0]).name in CLUSTER_TESTS, command


def test_every_job_script_is_run_or_marked() -> None:
    for script in sorted((ROOT / "jobs").glob("*")):
        if script.suffix in (".sbatch", ".sh") and "not run" not in script.read_text():
            assert script.name in CLUSTER_TESTS or script.name in SOURCED, script.name


def flags_of(command: str, ranks: int) -> list[list[str]]:
    """Return the flags of each training that a command starts, without those that jobs/env.sh adds."""
    words = shlex.split(command)
    script = next(
        number for number, word in enumerate(words) if word.startswith((*TRAINING_SCRIPTS, "./jobs/"))
    )
    name, (recipe, *rest) = Path(words[script]).stem, words[script + 1 :]
    if name == "finetune":
        rest = ["--finetune", *rest]
    if name == "elastic":
        assert rest == [rest[0], "3"]
        rest = ["--batch-size", str(int(rest[0]) // ranks)]
    if name == "coarse_to_fine":
        fine, *rest = rest
        stages = rest.index("--coarse"), rest.index("--fine")
        second = ["--finetune", "coarse", *rest[stages[1] + 1 :]]
        return [["--recipe", recipe, *rest[stages[0] + 1 : stages[1]]], ["--recipe", fine, *second]]
    return [["--recipe", recipe, *rest]]


TRAINING_SCRIPTS = tuple(
    f"jobs/{name}.sbatch" for name in ("pretrain", "finetune", "coarse_to_fine", "elastic")
)
TRAINING_COMMANDS = [
    command
    for command in commands()
    if any(word in command for word in (*TRAINING_SCRIPTS, "jobs/horovodrun.sh", "jobs/mpirun.sh"))
]


@pytest.mark.parametrize("command", TRAINING_COMMANDS)
def test_a_training_command_has_all_inputs_of_the_published_run_and_nearly_its_batch(command: str) -> None:
    nodes = re.search(r"--nodes=(\d+)", command)
    ranks = 8 * (int(nodes[1]) if nodes else 2)
    for flags in flags_of(command, ranks):
        config = resolve(parse([*flags, "--token-label-data", "maps"]).config, ranks)
        assert config.published.needs
        assert config_warnings(config) == []
        batch = derive(config, ranks=ranks, images=1_281_167).global_batch
        assert batch == pytest.approx(config.update.lr_base_size, rel=0.07)


def test_the_elastic_command_keeps_its_batch_on_fewer_nodes() -> None:
    line = next(command for command in commands() if "elastic" in command)
    assert all(int(shlex.split(line)[-2]) % (8 * nodes) == 0 for nodes in (5, 4, 3))


@pytest.mark.parametrize("command", DOCTOR_COMMANDS)
def test_the_doctor_examines_this_machine(command: str, tmp_path: Path) -> None:
    small = command.replace("doctor.json", str(tmp_path / "doctor.json"))
    done = run(["bash", "-c", f"cd {shlex.quote(str(ROOT))} && {small} --shared {tmp_path}"], seconds=120)
    assert done.returncode == 0, done.stdout
    if "--json" in command:
        report = json.loads((tmp_path / "doctor.json").read_text())
        assert {finding["level"] for finding in report["findings"]} <= {"ok", "warning"}
