"""The commands of README.md and of the guides, the documented plugin and the examples of docs/python.md run.

They run in their order, on a few images and with small networks. What they compute is tested elsewhere; here
each is spelled as documented, and finds what earlier ones wrote.
"""

import configparser
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shtab
import torch
from safetensors.torch import load_file

import horovod_volo.__main__ as console
from tests.documents import ROOT, blocks, commands_in, text_of
from tests.ranks.launching import environment
from tests.smoke.conftest import save_run, shell


def test_the_list_of_commands_and_the_versions(capsys, monkeypatch):
    def printed(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["horovod-volo", *arguments])
        assert console.main() == status
        return "".join(capsys.readouterr())

    listed = printed()
    assert all(f"  {name}" in listed for name in console.COMMANDS)
    assert "Did you mean evaluate?" in printed("evalute", status=2)
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert printed("--version") == f"horovod_volo {settings['metadata']['version']}\n"
    module, _, function = settings["options.entry_points"]["console_scripts"].partition("=")[2].partition(":")
    assert (module.strip(), function) == (console.__spec__.name, "main")


@pytest.mark.parametrize(
    ("line", "offered"), [("ev", "evaluate"), ("train --ep", "--epochs"), ("labels gen", "generate")]
)
def test_bash_completes_commands_and_flags(line: str, offered: str) -> None:
    ask = f'words=(horovod-volo {line}); COMP_WORDS=("${{words[@]}}"); COMP_CWORD=$((${{#words[@]}} - 1))'
    completion = shtab.complete(console.build_parser(), "bash")
    program = f"{completion}\n{ask}; _shtab_horovod_volo; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [offered]


SHORT = "--model volo_demo --epochs 1 --warmup-epochs 0 --cooldown-epochs 0 --drop-path 0 --log-every 1"
# A test below runs the demo and TensorBoard, and tests/faults/test_doctor.py the doctor; how a checkout is
# set up and tested shows at once.
ELSEWHERE = {"./tools/setup", "source tools/activate", "./tools/demo", "./tools/test"}
ELSEWHERE |= {"tensorboard --logdir runs", "horovodrun -np 2 python -m horovod_volo.doctor"}

SCRIPTS = ("pack", "labels", "export")
# What makes the commands small. Flags of a command come later and win.
SMALLER = {
    "--train 400 --val 100": "--train 40 --val 20",
    # A run is named after its data only if no model is given.
    "train photos": f"train photos {SHORT} --img-size 64 --batch-size 8 --name photos",
    "train /path/to/imagenet": f"train /path/to/imagenet {SHORT} --img-size 32 --batch-size 4",
    " -np 8": " -np 2",
    " -np 40": " -np 2",
    "--ranks 40": "--ranks 2",
    "--ranks 8": "--ranks 2",
    " -H node1:8,node2:8,node3:8,node4:8,node5:8": "",
    "--global-batch 1000": "--global-batch 8",
    "--resize 320": "--resize 48",
    # A random teacher in place of a downloaded one.
    "dm_nfnet_f6 --teacher-pretrained": "resnet18 --img-size 64 --teacher-weights /path/to/weights.pth",
    "--model volo_d1": "--model resnet18 --img-size 64",
    "runs/volo_d1": "/path/to/run",
    "--img-size 288": "--img-size 48",
    "--img-size 384": "--img-size 96",
    # Which is what these scripts run, in a fork.
    **{f"tools/{name} ": f"horovod-volo {name} " for name in SCRIPTS},
}
# What the commands of each document write.
WRITTEN = {
    "docs/tutorial.md": [
        *(f"runs/{name}/checkpoints/best/model.safetensors" for name in ("photos", "with_labels")),
        *(f"runs/{name}/checkpoints/best/model.safetensors" for name in ("other_size", "two_ranks")),
        *("exported/model.onnx", "exported/config.json", "predictions.html", "label.png"),
    ],
    "README.md": [f"runs/{name}/checkpoints/last/model.safetensors" for name in ("volo_d1", "volo_d5")],
    "docs/data.md": ["packed/train/manifest.json", "store", "own_store", "picture.png"],
    "docs/evaluation.md": ["predictions.html", "accuracy.json"],
    "docs/export.md": ["export/model.onnx", "averaged/model.safetensors", "export384/config.json"],
}


def prepare(folder: Path, images: Path, document: str) -> None:
    """Put images under the names that the documents use, and a run of timm's resnet18."""
    save_run(folder / "run", "resnet18")
    if document != "docs/evaluation.md":
        (folder / "imagenet").symlink_to(images)
        (folder / "token_label_data").symlink_to(images / "token_labels")
        return
    (folder / "photos").symlink_to(images / "val")
    for number, file in enumerate(sorted((images / "val").rglob("*.jpg")), 1):
        named = folder / "imagenet" / "val" / str(number % 10) / f"ILSVRC2012_val_{number:08d}.JPEG"
        numbered = folder / "imagenetv2" / str(number % 10) / file.name
        for copy in (named, numbered):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    (folder / "real.json").write_text(json.dumps([[number % 10] for number in range(50)]))


def adapted(text: str, folder: Path) -> str:
    """Replace the paths of a command or a program, and what would take long."""
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text.replace("/path/to/", f"{folder}/")


@pytest.mark.parametrize("document", WRITTEN)
def test_the_commands_of_a_document_run(document: str, images: Path, tmp_path: Path) -> None:
    elsewhere = ELSEWHERE
    if document == "README.md":
        elsewhere = elsewhere | set(commands_in(text_of("docs/tutorial.md")))  # on the same photos
    prepare(tmp_path, images, document)
    for command in commands_in(text_of(document)):
        if command not in elsewhere:
            printed = shell(adapted(command, tmp_path), tmp_path)
            assert document != "docs/export.md" or "timm: outputs differ by 0.0e+00 at most" in printed
    for result in WRITTEN[document]:
        written = tmp_path / result
        assert any(written.iterdir()) if written.is_dir() else written.stat().st_size > 100
    if document == "docs/tutorial.md":
        larger = tomllib.loads((tmp_path / "runs" / "other_size" / "resolved.toml").read_text())
        assert (larger["model"]["img_size"], larger["update"]["lr"]) == (96, 1e-4)
    if document == "docs/export.md":
        exports = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "averaged"))
        best, averaged = (tensors["fc.weight"] for tensors in exports)
        assert torch.equal(averaged, 2 * best)
        for block in blocks(text_of(document)):
            if block.language == "python":
                names: dict[str, object] = {}
                exec(adapted(block.code, tmp_path), names)
                assert "prepare" in names or names["logits"].shape == (5, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_tools_starts_its_command(name: str) -> None:
    done = subprocess.run([ROOT / "tools" / name, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: horovod-volo {name} ")


def test_tools_demo_trains_and_tensorboard_shows_the_run(request: pytest.FixtureRequest) -> None:
    """Trains two of the demo's epochs, with --long all of them, in a run folder of its own."""
    flags, least = ("", 96.0) if request.config.getoption("--long") else (" --epochs 2", 35.0)
    printed = shell(f"./tools/demo{flags}", ROOT, seconds=1500, DEMO_NAME="readme_test")
    accuracies = re.findall(r"after epoch .*: top-1 ([\d.]+) %", printed)
    assert float(accuracies[-1]) >= least, printed
    assert "tensorboard --logdir runs" in printed.splitlines()[-1]
    assert {"train/loss", "train/lr", "evaluation/top1"} <= tags_of_server(ROOT / "runs", "readme_test")


def tags_of_server(logdir: Path, run: str) -> set[str]:
    """Return the tags of a run's curves, as a TensorBoard server lists them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [".venv/bin/tensorboard", "--logdir", str(logdir), "--port", str(port), "--load_fast=false"]
    # TensorBoard's own imports warn; warnings are errors in this project's processes only.
    started = environment(PYTHONWARNINGS="")
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env=started) as server:
        try:
            for _ in range(180):
                with contextlib.suppress(OSError):
                    address = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
                    with urllib.request.urlopen(address, timeout=5) as page:
                        found = json.loads(page.read())
                    if run in found:
                        return set(found[run])
                time.sleep(0.5)
        finally:
            server.terminate()
    raise AssertionError("TensorBoard did not show the run")


PLUGIN = "--plugin my_package.my_module"
CHOSEN = f"{PLUGIN} --model tiny_conv --loss focal --opt signum --sched square --aa mine-m9-n2"


def test_the_documented_plugin_trains_is_evaluated_and_measured(images: Path, tmp_path: Path) -> None:
    (module,) = [block.code for block in blocks(text_of("docs/plugins.md")) if block.language == "python"]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "my_module.py").write_text(module)

    recipe = f"{images} --recipe demo --no-token-label -b 8 --log-every 1 {CHOSEN}"
    printed = shell(f"horovod-volo train {recipe} --name mine --stop-at-step 5", tmp_path, status=75)
    assert "tiny_conv, 954 parameters" in printed  # (3 * 16 + 1) * 16 + (16 + 1) * 10
    lines = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "lr" in record]
    assert len(losses) == 5
    # The focal loss of ten equal probabilities is (1 - 0.1)^2 ln 10.
    assert losses[0] == pytest.approx(1.87, abs=0.3)

    evaluate = f"horovod-volo evaluate {images} --weights runs/mine -b 8 --json result.json"
    shell(f"{evaluate} {PLUGIN}", tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["model"] == "tiny_conv"
    refused = shell(evaluate, tmp_path, status=2)
    assert "the model tiny_conv of a plugin. Add --plugin my_package.my_module." in refused

    tiny = "--model tiny_conv --img-size 32 --batch-size 2 --pairs 2 --json"
    measured = shell(f"horovod-volo bench step {tiny} {PLUGIN} 2>/dev/null", tmp_path)
    assert json.loads(measured)["name"] == "step tiny_conv 32"


EXAMPLES = [block.code for block in blocks(text_of("docs/python.md")) if block.language == "python"]
# Smaller images.
SMALLER_EXAMPLE = {
    "epochs=3": "epochs=1, img_size=32, batch_size=8",
    'recipe="demo"': 'recipe="demo", img_size=32',
    '"recipe": "demo"': '"recipe": "demo", "img_size": 32',
}


def log_of(names: dict[str, Any]) -> str:
    return str((names["result"].folder / "log.txt").read_text())


# By a part of each example: what is true of its variables, and of what it prints, after it has run.
EXPECTED: dict[str, Callable[[dict[str, Any], str], object]] = {
    "result.best": lambda names, _: names["result"].finished and names["result"].best["images"] == 20,
    "by_recipe": lambda names, _: names["trainer"].folder == Path("runs/shorter"),
    "trainer.predict": lambda _, printed: (
        re.search(r"^\w+: \d+ %$", printed, re.M) and Path("exported/model.safetensors").is_file()
    ),
    "StopAtAccuracy": lambda names, _: (
        "531,484 parameters, 4 steps on 1 ranks" in log_of(names)
        and re.search(r"^(finished|stopped) at step \d$", log_of(names), re.M)
    ),
}


@pytest.mark.parametrize("part", EXPECTED)
def test_an_example(part, images, tmp_path, monkeypatch, capsys):
    assert len(EXAMPLES) == len(EXPECTED)
    (code,) = [code for code in EXAMPLES if part in code]
    for large, small in SMALLER_EXAMPLE.items():
        code = code.replace(large, small)
    photo = sorted((images / "val").rglob("*.jpg"))[0]
    code = code.replace("/path/to/images", str(images)).replace("/path/to/photo.jpg", str(photo))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"docs/python.md, {part}", "exec"), names)
    assert EXPECTED[part](names, capsys.readouterr().out)
