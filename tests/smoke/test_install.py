"""A wheel and a source archive, installed into clean environments: the commands run with core packages only.

Takes minutes and the package index: add --install. torch and torchvision are installed first, as
docs/install.md says, in the tested versions.
"""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set

pytestmark = pytest.mark.install
ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
EACH_EXTRA = {  # the modules that each one alone adds
    "dali": "nvidia.dali",
    "dali-cuda13": "nvidia.dali",
    "horovod": "cloudpickle, cffi, psutil, yaml",
    "export": "onnx, onnxscript, onnxruntime",
    "remote": "obstore, boto3",
    "test": "pytest, xdist, triton",
    "dev": "mypy",
    "docs": "mkdocs, material",
}
TRAINED = ("--model", "volo_demo", "--img-size", "64", "-b", "8", "--epochs", "1", "--name", "run")


def call(folder: Path, *command: object, status: int = 0) -> str:
    """Run a command in a folder, without this process's PYTHONPATH; return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a source archive of the committed and uncommitted files, and its wheel."""
    folder = tmp_path_factory.mktemp("archives")
    source = folder / "source"
    listed = call(ROOT, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = folder / "build"
    call(folder, sys.executable, "-m", "venv", build)
    call(folder, build / "bin/python", "-m", "pip", "install", "--quiet", "build")
    call(folder, build / "bin/python", "-m", "build", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, archives: Path) -> Path:
    """Return the programs of an environment with the wheel and its core packages."""
    folder = tmp_path_factory.mktemp("clean")
    call(folder, sys.executable, "-m", "venv", folder / "venv")
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS]
    call(folder, *pip, "torch", "torchvision")
    (wheel,) = archives.glob("*.whl")
    call(folder, *pip, wheel)
    return folder / "venv/bin"


def test_the_archives_contain_the_package_and_nothing_else(archives: Path) -> None:
    (wheel,), (source,) = archives.glob("*.whl"), archives.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    listed = call(ROOT, "git", "ls-files", "--cached", "--others", "--exclude-standard", "horovod_volo")
    assert names == set(listed.split())
    assert "horovod_volo/config/recipes/volo_d1.toml" in names
    assert "horovod_volo/cluster/build_horovod.sh" in names
    with tarfile.open(source) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    about = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {name for name in files if not name.startswith("horovod_volo.egg-info/")} == names | about


@pytest.mark.parametrize("extra", EACH_EXTRA)
def test_each_extra_alone_adds_what_it_is_for(clean, archives, tmp_path, extra):
    """In an environment of its own, which sees the core packages of the clean one."""
    call(tmp_path, sys.executable, "-m", "venv", "venv")
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (core,) = (clean.parent / "lib").glob("python*/site-packages")
    (packages / "core.pth").write_text(f"{core}\n")
    python = tmp_path / "venv/bin/python"
    (wheel,) = archives.glob("*.whl")
    call(tmp_path, python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, f"{wheel}[{extra}]")
    call(tmp_path, python, "-m", "pip", "check")
    call(tmp_path, python, "-c", f"import torch; import {EACH_EXTRA[extra]}")
    make_demo_set(tmp_path / "images", train=20, val=10)
    trained = call(tmp_path, python, "-m", "horovod_volo.train", "images", *TRAINED)
    reader = "DALI" if extra.startswith("dali") else "Pillow"
    assert f"images read by {reader}" in trained
