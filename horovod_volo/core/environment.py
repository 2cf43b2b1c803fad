"""Versions of Python, packages and this code. Never environment variables, which may hold secrets."""

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


def collect_environment() -> dict[str, Any]:
    """Return the versions that another run needs to repeat this one."""
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
    """Return the commit of this package, with "+changes" if a tracked file of it differs from the commit."""
    package = Path(__file__).parents[1]
    try:
        commit = _git(package, "rev-parse", "--short=12", "HEAD")
        changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
        return f"{commit}+changes" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
