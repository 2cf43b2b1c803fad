"""The commands of docs/tutorial.md run in their order on a few drawn images, with a small network.

The five commands of README.md are among them.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.ranks.forking import path_of_forks
from tests.ranks.launching import run

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model volo_demo --img-size 64 --epochs 1 --warmup-epochs 0 --cooldown-epochs 0 --drop-path 0 "
    "--batch-size 8 --log-every 1"
)
# tests/smoke/test_readme.py runs these.
ELSEWHERE = {
    "./tools/setup",
    "source tools/activate",
    "./tools/demo",
    "tensorboard --logdir runs",
    "horovodrun -np 2 python -m horovod_volo.doctor",
}


def commands(document: str) -> list[str]:
    """Return the commands that need nothing; a block that does says so on the line before it."""
    text = re.sub(r"<!-- needs: .+? -->\n```sh\n.*?```", "", (ROOT / document).read_text(), flags=re.S)
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


HERE = [command for command in commands("docs/tutorial.md") if command not in ELSEWHERE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the commands run."""
    return tmp_path_factory.mktemp("tutorial")


@pytest.mark.parametrize("command", HERE)
def test_a_command_of_the_tutorial_runs(command: str, folder: Path) -> None:
    """Each uses the results of earlier ones."""
    small = command.replace("--train 400 --val 100", "--train 40 --val 20")
    # Flags of the command come later and win. A run is named after its data only if no model is given.
    small = small.replace("train photos", f"train photos {SMALL} --name photos")
    activate, forks = shlex.quote(str(ROOT / "tools" / "activate")), shlex.quote(path_of_forks())
    prepare = f"cd {shlex.quote(str(folder))} && source {activate} && PATH={forks}"
    done = run(["bash", "-c", f"{prepare} && {small}"], seconds=200)
    assert done.returncode == 0, done.stdout


def test_the_commands_wrote_their_results(folder: Path) -> None:
    assert len(HERE) > 12
    for name in ("photos", "with_labels", "larger_images", "two_ranks"):
        assert (folder / "runs" / name / "checkpoints" / "best" / "model.safetensors").is_file()
    for result in ("exported/model.onnx", "exported/config.json", "predictions.html", "label.png"):
        assert (folder / result).stat().st_size > 100
    larger = tomllib.loads((folder / "runs" / "larger_images" / "resolved.toml").read_text())
    assert larger["model"]["img_size"] == 96
    assert larger["update"]["lr"] == 1e-4


def test_the_commands_of_the_readme_are_those_of_the_tutorial() -> None:
    starts = ("horovod-volo ", "tensorboard ")
    five = [command for command in commands("README.md") if command.startswith(starts)]
    assert len(five) == 5
    assert set(five) <= set(commands("docs/tutorial.md"))
