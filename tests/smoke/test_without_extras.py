"""Without the folders of extras, and without the packages that they need, the rest works and names them.

That no extra needs another one, so that each can be deleted alone, is a contract of import-linter in
pyproject.toml.
"""

import shutil
from pathlib import Path

from tests.documents import ROOT
from tests.smoke.conftest import HELD_OUT_IMAGES, run_in_one_process, save_run
from tests.unit.box_samples import annotation, image, write_coco

EXTRAS = ("bench", "demo", "dense", "doctor", "elastic")
EXTRAS += ("kernels", "labelling", "pictures", "profiler", "remote", "report")
SMALL = "--model volo_demo --img-size 32 --batch-size 4"
REFUSED = {  # by the extra that each needs
    "dense": "train {images} --task segmentation --model volo_d1",
    "elastic": "train {images} --elastic --model volo_demo --global-batch 8",
    "remote": "train https://example.org/shards",
}


def test_the_core_trains_without_extras_and_refuses_them_by_name(images: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy" / "horovod_volo"
    shutil.copytree(ROOT / copied.name, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for name in EXTRAS:
        shutil.rmtree(copied / name)
    refused = {name: command.format(images=images) for name, command in REFUSED.items()}
    trained = f"train {images} {SMALL} --epochs 1 --name run"
    printed = run_in_one_process(tmp_path, trained, *refused.values(), package=copied.parent)
    assert "done: 10 steps" in printed[trained]
    assert printed[trained].endswith("status 0\n")
    assert not (tmp_path / "runs/run/ledger.jsonl").exists()  # of elastic
    for extra, command in refused.items():
        assert f"needs horovod_volo/{extra}, which is not installed" in printed[command]
        assert printed[command].endswith("status 2\n")


READ_BY_PILLOW = "images read by Pillow (DALI is not installed)"
BLOCKED = ("horovod", "nvidia.dali", "faster_coco_eval", "mpi4py", "onnxruntime", "matplotlib")


def test_the_commands_of_one_rank(images: Path, tmp_path: Path) -> None:
    names = sorted(path.name for path in (images / "val").iterdir())
    weights, held_out = save_run(tmp_path / "weights", names=names), next((images / "val").rglob("*.jpg"))
    train = f"train {images} --model volo_demo --img-size 64 -b 16 --epochs 1 --name new"
    boxes = tmp_path / "boxes"
    for split in ("train2017", "val2017"):
        write_coco(boxes, [image(1, 40, 40)], [annotation(1, (0, 0, 20, 20))], split)
    commands = {
        "train": train,
        "resumed with another decoder": f"{train} --resume auto --image-decoder dali",
        "detection": f"train {boxes} --task detection --model volo_d1 --img-size 224 -b 1",
        "evaluate": f"evaluate {images} --weights runs/new",
        "predict": f"predict {weights} {held_out}",
        "report": "report runs/new",
        "export": f"export {weights} exported --onnx",
        "generate": f"labels generate {images} store --teacher {weights} --img-size 64 --top 3",
        "verify": f"labels verify store --data {images}",
        "doctor": "doctor",
    }
    printed = run_in_one_process(tmp_path, *commands.values(), blocked=BLOCKED)
    found = {name: printed[command] for name, command in commands.items()}
    refused = found.pop("resumed with another decoder")
    assert "DALI is not installed. Install it (pip install 'horovod_volo[dali]'" in refused
    assert refused.endswith("status 2\n")
    assert "pip install 'horovod_volo[dense]'" in found["detection"]
    assert found.pop("detection").endswith("status 2\n")
    for name, text in found.items():
        assert text.endswith("status 0\n"), text
        assert (READ_BY_PILLOW in text) == (name in ("train", "evaluate", "generate")), text
    assert f"decoder  {READ_BY_PILLOW}" in found["train"]
    assert f"images    {HELD_OUT_IMAGES} of " in found["evaluate"]
    assert "one rank needs none" in found["doctor"]
    assert "Pillow reads the images" in found["doctor"]
    assert (tmp_path / "exported" / "model.onnx").exists()
    assert "<img" in (tmp_path / "runs/new/report.html").read_text()


def test_several_ranks_name_the_build_of_horovod(images: Path, tmp_path: Path) -> None:
    command = f"evaluate {images} --weights weights"
    launched = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    printed = run_in_one_process(tmp_path, command, blocked=BLOCKED, **launched)[command]
    assert printed.count("Build it: horovod-volo build-horovod --install.") == 1
    assert printed.endswith("status 2\n")
    assert "Traceback" not in printed
