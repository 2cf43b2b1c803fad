"""On one rank every command works without Horovod and without DALI, and says that Pillow reads the images."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from horovod_volo import evaluate
from horovod_volo.config.schema import Data
from horovod_volo.data.image_decoder import DecoderName
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import EvalLoader
from horovod_volo.models.build import build_model
from horovod_volo.models.pretrained import load_pretrained
from horovod_volo.models.weights_header import header_of
from tests.ranks.launching import run
from tests.smoke.conftest import HELD_OUT_IMAGES

READ_BY_PILLOW = "images read by Pillow (DALI is not installed)"
BLOCKED = ("horovod", "nvidia.dali", "mpi4py", "onnxruntime", "matplotlib")
# Runs the commands of the lines of stdin, one after the other, in a process without these packages.
PROGRAM = f"""
import runpy, shlex, sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
for line in sys.stdin:
    print("$", line, end="", flush=True)
    sys.argv[1:] = shlex.split(line)
    try:
        runpy.run_module("horovod_volo", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("status", ended.code or 0, flush=True)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, demo_set: Path) -> str:
    """Return a run folder with a network that predicts several classes."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=64, num_classes=10, drop_path=0.0)
    with torch.no_grad():
        network.head.weight.normal_()
    names = sorted(path.name for path in (demo_set / "val").iterdir())
    save_file(network.state_dict(), folder / "model.safetensors", metadata=header_of(names))
    (folder / "resolved.toml").write_text('[model]\nmodel = "volo_demo"\nimg_size = 64\n')
    return str(folder)


def outputs(folder: Path, *commands: str, ranks: int = 1) -> dict[str, str]:
    """Run commands without these packages in a folder; return what each printed."""
    lines = folder / "commands.txt"
    lines.write_text("\n".join(commands) + "\n")
    command = f"cd {folder} && {sys.executable} -c {shlex.quote(PROGRAM)} < {lines}"
    launched = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": str(ranks)} if ranks > 1 else {}
    root = Path(__file__).parents[2]
    done = run(["bash", "-c", command], seconds=240, PYTHONPATH=str(root), **launched)
    printed = dict(part.split("\n", 1) for part in done.stdout.split("$ ")[1:])
    assert list(printed) == list(commands), done.stdout
    return printed


def test_the_commands_of_one_rank(weights: str, demo_set: Path, tmp_path: Path) -> None:
    held_out = next((demo_set / "val").rglob("*.jpg"))
    train = f"train {demo_set} --model volo_demo --img-size 64 -b 16 --epochs 1 --name new"
    commands = {
        "train": train,
        "resumed with another decoder": f"{train} --resume auto --image-decoder dali",
        "evaluate": f"evaluate {demo_set} --weights runs/new",
        "predict": f"predict {weights} {held_out}",
        "export": f"export {weights} exported --onnx",
        "generate": f"labels generate {demo_set} store --teacher {weights} --img-size 64 --top 3",
        "verify": f"labels verify store --data {demo_set}",
        "doctor": "doctor",
    }
    printed = outputs(tmp_path, *commands.values())
    found = {name: printed[command] for name, command in commands.items()}
    refused = found.pop("resumed with another decoder")
    assert "DALI is not installed. Install it (pip install 'horovod_volo[dali]')" in refused
    assert refused.endswith("status 2\n")
    for name, text in found.items():
        assert text.endswith("status 0\n"), text
        assert (READ_BY_PILLOW in text) == (name in ("train", "evaluate", "generate")), text
    assert f"decoder  {READ_BY_PILLOW}" in found["train"]
    assert f"images    {HELD_OUT_IMAGES} of " in found["evaluate"]
    assert "one rank needs none" in found["doctor"]
    assert "Pillow reads the images" in found["doctor"]
    assert (tmp_path / "exported" / "model.onnx").exists()


def test_several_ranks_name_the_build_of_horovod(weights: str, demo_set: Path, tmp_path: Path) -> None:
    command = f"evaluate {demo_set} --weights {weights}"
    printed = outputs(tmp_path, command, ranks=2)[command]
    assert printed.count('Build it: pip install "$(horovod-volo build_horovod)".') == 1
    assert printed.endswith("status 2\n")
    assert "Traceback" not in printed


def test_an_evaluation_by_pillow_is_that_by_dali(
    weights: str, demo_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured: logits, whose standard deviation is 5.3, differ by 0.022 at most; no prediction changes."""
    found = {}
    for decoder in ("dali", "pillow"):
        file = tmp_path / f"{decoder}.json"
        arguments = [str(demo_set), "--weights", weights, "--image-decoder", decoder, "--json", str(file)]
        assert evaluate.main(arguments) == 0
        found[decoder] = json.loads(file.read_text())
        message = "images read by Pillow (--image-decoder pillow)"
        assert (message in capsys.readouterr().out) == (decoder == "pillow")
    dali, pillow = found["dali"], found["pillow"]
    assert (dali.pop("image_decoder"), pillow.pop("image_decoder")) == ("dali", "pillow")
    assert pillow["top1_right"] == dali["top1_right"]
    assert pillow["loss"] == pytest.approx(dali["loss"], rel=1e-2)
    logits = [logits_of(weights, demo_set, decoder) for decoder in ("dali", "pillow")]
    assert len(logits[0]) == HELD_OUT_IMAGES
    assert float((logits[0] - logits[1]).abs().max()) < 0.01 * float(logits[0].std())


def logits_of(weights: str, folder: Path, decoder: DecoderName) -> torch.Tensor:
    loader = EvalLoader(
        build_catalog(str(folder), "val", None),
        Data(batch_size=16, image_decoder=decoder),
        image_size=64,
        crop_pct=0.9,
        rank=0,
        size=1,
        device=torch.device("cpu"),
        threads=2,
    )
    network = load_pretrained(weights).network
    with closing(loader), torch.inference_mode():
        return torch.cat([network(batch.images) for batch in loader])
