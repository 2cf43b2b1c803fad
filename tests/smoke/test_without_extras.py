"""Without the folders of all extras, the core trains; and what an extra brings is refused with its name.

That no extra needs another one, so that each can be deleted alone, is a contract of import-linter in
pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.documents import ROOT
from tests.smoke.conftest import run_in_one_process

EXTRAS = ("bench", "demo", "dense", "doctor", "elastic")
EXTRAS += ("kernels", "labelling", "pictures", "profiler", "remote", "report")
SMALL = "--model volo_demo --img-size 32 --batch-size 4"
REFUSED = {  # by the extra that each needs
    "dense": "train {images} --task segmentation --model volo_d1",
    "elastic": "train {images} --elastic --model volo_demo --global-batch 8",
    "remote": "train https://example.org/shards",
}


def test_the_core_trains_without_extras_and_refuses_them_by_name(demo_set: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy" / "horovod_volo"
    shutil.copytree(ROOT / copied.name, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for name in EXTRAS:
        shutil.rmtree(copied / name)
    refused = {name: command.format(images=demo_set) for name, command in REFUSED.items()}
    trained = f"train {demo_set} {SMALL} --epochs 1 --name run"
    printed = run_in_one_process(tmp_path, trained, *refused.values(), package=copied.parent)
    assert "done: 10 steps" in printed[trained]
    assert printed[trained].endswith("status 0\n")
    assert not (tmp_path / "runs/run/ledger.jsonl").exists()  # of elastic
    for extra, command in refused.items():
        assert f"needs horovod_volo/{extra}, which is not installed" in printed[command]
        assert printed[command].endswith("status 2\n")
