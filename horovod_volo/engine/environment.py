"""With what a run was made: versions, code, hosts. Never the environment itself, which holds secrets."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "horovod",
    "timm",
    "torchvision",
    "nvidia-dali-cuda120",
    "tensorboard",
    "numpy",
    "pillow",
)


def environment_facts() -> dict[str, Any]:
    """Return what another run must have in common to be the same run."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": code_commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def code_commit() -> str:
    """Return the commit this code is at, marked where files differ from it."""
    here = Path(__file__).parent
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + (
            "+changes" if _git(here, "status", "--porcelain", "--untracked-files=no", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
