"""Imports point down only, and each heavy dependency has one door."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from import_rules import broken_rules

PACKAGE = Path(__file__).parents[2] / "horovod_volo"


def test_the_package_keeps_the_rules() -> None:
    assert broken_rules(PACKAGE) == []


def house(folder: Path, files: dict[str, str]) -> Path:
    """Write a package called `house` and return its folder."""
    package = folder / "house"
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("config/schema.py", "from house.engine import loop", "engine is above config"),
        ("config/schema.py", "import numpy", "standard library alone"),
        ("data/loader.py", "import house.engine.loop as x", "engine is above data"),
        ("data/loader.py", "from house import engine", "engine is above data"),
        ("data/loader.py", "from ..engine.loop import fit", "engine is above data"),
        ("data/loader.py", "from .. import engine", "engine is above data"),
        ("data/far/away.py", "from ...engine import loop", "engine is above data"),
        ("data/__init__.py", "from ..engine import loop", "engine is above data"),
        ("data/loader.py", "from ..cluster import world", "data and cluster are on one floor"),
        ("train.py", "import house.bench.results", "train and bench are on one floor"),
        ("engine/loop.py", "from .. import train", "train is above engine"),
        ("engine/loop.py", "import house", "the package itself is no room"),
        ("attic/box.py", "from house.config import schema", "attic is no room"),
        ("engine/loop.py", "import horovod.torch as hvd", "its one door is cluster"),
        ("engine/loop.py", "from nvidia import dali", "its one door is data"),
        ("engine/loop.py", "from nvidia.dali import fn", "its one door is data"),
        ("engine/state.py", "from apex.optimizers import FusedLAMB", "its one door is optim"),
        ("engine/loop.py", "from torch.utils.tensorboard import SummaryWriter", "its one door is monitor"),
        ("cluster/collectives.py", "import torch.distributed as dist", "its one door is shut"),
        ("bench/machine/step.py", "import timm", "its one door is models"),
        ("bench/machine/peers_loss.py", "import nvidia.dali", "its one door is data"),
        ("models/build.py", "if TYPE_CHECKING:\n    from house.engine import loop", "engine is above models"),
        ("models/build.py", "def late():\n    import house.data.stream", "models and data are on one floor"),
        ("optim/adamw.py", "import importlib\nimportlib.import_module('timm.layers')", "door is models"),
        ("optim/adamw.py", "__import__('horovod')", "door is cluster"),
    ],
)
def test_a_broken_rule_is_found(file: str, source: str, rule: str, tmp_path: Path) -> None:
    found = broken_rules(house(tmp_path, {file: source}))
    assert any(message.startswith(f"{file}:") and rule in message for message in found), found


def test_what_is_allowed_is_let_through(tmp_path: Path) -> None:
    files = {
        "config/schema.py": "import argparse\nfrom .values import shown\nfrom house.config import values",
        "cluster/collectives.py": "import horovod.torch as hvd\nimport torch\nfrom ..config import errors",
        "data/loader.py": "from nvidia.dali import fn\nfrom . import order\nfrom .order import epoch_order",
        "models/build.py": "from timm.models.volo import VOLO",
        "monitor/run_logger.py": "from torch.utils.tensorboard import SummaryWriter",
        "engine/loop.py": "from house.cluster import ring\nfrom ..data.stream import Batch\nimport timms",
        "bench/machine/loss.py": "from house.engine import loop\nfrom house.bench import comparison",
        "bench/machine/peers_reduce.py": "import horovod.torch\nimport torch.distributed",
        "train.py": "from .engine.loop import fit\nimport house.config.schema",
    }
    assert broken_rules(house(tmp_path, files)) == []


def test_a_rule_broken_in_the_real_package_is_found(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    broken = copy / "objective" / "roi_weights.py"
    broken.write_text(f"{broken.read_text(encoding='utf-8')}\nimport horovod_volo.engine.loop as above\n")
    assert len(broken_rules(copy)) == 1
    assert "engine is above objective" in broken_rules(copy)[0]
