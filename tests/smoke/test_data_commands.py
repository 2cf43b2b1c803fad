"""The commands of docs/data.md, in the document's order, on a few images."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from horovod_volo.models.build import build_model
from tests.ranks.forking import path_of_forks
from tests.ranks.launching import run

ROOT = Path(__file__).parents[2]
TEACHER = "--teacher dm_nfnet_f6 --teacher-pretrained"


def commands() -> list[str]:
    text = (ROOT / "docs" / "data.md").read_text()
    blocks = re.findall(r"(?<!-->\n)```sh\n(.*?)```", text, flags=re.S)  # those that need nothing else
    return [line for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(demo_set, tmp_path_factory):
    """Return a folder for the commands' results, with a random teacher in place of a downloaded one."""
    folder = tmp_path_factory.mktemp("commands")
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0)
    torch.save(network.state_dict(), folder / "teacher.pt")
    return folder


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_document_runs(command, folder, demo_set):
    """The commands run in the document's order; each uses the results of earlier ones."""
    small = command.replace(" -np 8", " -np 2").replace(" --resize 320", " --resize 48")
    small = small.replace(TEACHER, f"--teacher volo_demo --img-size 64 --teacher-weights {folder}/teacher.pt")
    small = small.replace("/path/to/imagenet", str(demo_set))
    small = small.replace("/path/to/token_label_data", str(demo_set / "token_labels"))
    small = small.replace("/path/to/", f"{folder}/").replace("picture.png", f"{folder}/picture.png")
    prepare = f"cd {shlex.quote(str(ROOT))} && source tools/activate && PATH={shlex.quote(path_of_forks())}"
    done = run(["bash", "-c", f"{prepare} && {small}"], seconds=200)
    assert done.returncode == 0, done.stdout


def test_the_commands_wrote_their_results(folder):
    assert (folder / "packed" / "train" / "manifest.json").is_file()
    for result in ("store", "own_store", "picture.png"):
        assert (folder / result).exists()
