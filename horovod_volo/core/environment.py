"""Versions of Python, packages and this code. Never environment variables, which may hold secrets."""

import hashlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from horovod_volo.core.atomic_file import file_sha256

PACKAGE = Path(__file__).parents[1]
_CODE = (".py", ".toml")
_PACKAGES = "torch horovod timm torchvision nvidia-dali-cuda120 nvidia-dali-cuda130 tensorboard numpy pillow"


def collect_environment() -> dict[str, Any]:
    """Return the versions that another run needs to repeat this one."""
    return {"python": platform.python_version(), "packages": package_versions(), "commit": code_commit()}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    return {name: _version(name) for name in _PACKAGES.split()}


def code_hashes(package: Path) -> dict[str, str]:
    """Return the SHA-256 of each source file and recipe of a package, by relative path."""
    files = (file for file in sorted(package.rglob("*")) if file.suffix in _CODE)
    return {file.relative_to(package).as_posix(): file_sha256(file) for file in files}


def code_digest() -> str:
    """Return a digest of this package's source files and recipes."""
    return hashlib.sha256(repr(code_hashes(PACKAGE)).encode()).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def code_commit() -> str:
    """Return the commit of this package, with "+changes" if a tracked file of it differs from the commit."""
    try:
        commit = _git(PACKAGE, "rev-parse", "--short=12", "HEAD")
        changed = _git(PACKAGE, "status", "--porcelain", "--untracked-files=no", ".")
        return f"{commit}+changes" if changed else commit
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
