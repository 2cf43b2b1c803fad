"""What tools/gpu_pack packs arrives in parts, which tools/gpu_setup checks and unpacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE_FOR = "cpython-312 x86_64 torch 2.11.0+cu130"


def shell(command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that uses the functions of tools/gpu_archive."""
    script = f"set -euo pipefail; source {ROOT}/tools/gpu_archive; {command}"
    return subprocess.run(
        ["bash", "-c", script, "test", *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Return a folder with an archive of one file of random bytes, in three parts."""
    site, folder = tmp_path / "packed", tmp_path / "parts"
    (site / "package").mkdir(parents=True)
    folder.mkdir()
    (site / "package" / "data").write_bytes(os.urandom(5000))
    subprocess.run(["tar", "-cJf", tmp_path / "site.tar.xz", "-C", site, "."], check=True)
    done = shell(
        'write_parts "$1" "$2" 2000 "$3"; echo left over >"$2/site.tar.xz.03"',
        tmp_path / "site.tar.xz",
        folder,
        MADE_FOR,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a checkout on a machine whose python3 reports the version that the archive was made for."""
    folder = tmp_path / "machine"
    (folder / "tools").mkdir(parents=True)
    for name in ("gpu_setup", "gpu_archive"):
        shutil.copy(ROOT / "tools" / name, folder / "tools" / name)
    report_version(folder, MADE_FOR)
    return folder


def report_version(machine: Path, version: str) -> None:
    (machine / "python3").write_text(f"#!/bin/sh\necho {version}\n")
    (machine / "python3").chmod(0o755)


def refusal(machine: Path, archive: Path) -> str:
    done = subprocess.run(
        [str(machine / "tools" / "gpu_setup"), "--no-gpu"],
        env=os.environ | {"ARCHIVE": str(archive), "PYTHON": str(machine / "python3")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert not (machine / ".venv").exists()
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_parts_of_equal_size_are_joined_and_unpacked(parts: Path, tmp_path: Path) -> None:
    sizes = [(parts / f"site.tar.xz.0{number}").stat().st_size for number in range(3)]
    assert max(sizes) <= 2000
    assert max(sizes) - min(sizes) <= 3
    done = shell('unpack_parts "$1" "$2" "$3"', parts, sys.executable, tmp_path / "unpacked")
    assert done.returncode == 0, done.stderr
    unpacked = tmp_path / "unpacked" / "package" / "data"
    assert unpacked.read_bytes() == (tmp_path / "packed" / "package" / "data").read_bytes()


def test_a_missing_or_damaged_part_is_refused(parts: Path, machine: Path) -> None:
    assert "There is no folder" in refusal(machine, parts / "elsewhere")
    part = parts / "site.tar.xz.01"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"The archive in {parts} is damaged" in refusal(machine, parts)
    part.unlink()
    assert f"The archive in {parts} is incomplete: site.tar.xz.01 is missing" in refusal(machine, parts)
    (parts / "manifest").unlink()
    assert f"There is no manifest in {parts}" in refusal(machine, parts)


def test_an_archive_for_another_interpreter_is_refused(parts: Path, machine: Path) -> None:
    report_version(machine, "cpython-311 x86_64 torch 2.11.0+cu130")
    expected = f"is for {MADE_FOR}, but {machine}/python3 is cpython-311 x86_64 torch 2.11.0+cu130."
    assert expected in refusal(machine, parts)
    (machine / "python3").write_text("#!/bin/sh\nexit 1\n")
    assert "python3 has no PyTorch" in refusal(machine, parts)


def test_an_environment_borrows_the_packages_of_another(tmp_path: Path) -> None:
    done = shell(
        'make_borrowing_venv "$1" "$2"; compiled_for "$1"; compiled_for "$2/bin/python"',
        sys.executable,
        tmp_path / "venv",
    )
    lender, borrower = done.stdout.splitlines()
    assert lender == borrower
    assert lender.startswith(f"{sys.implementation.cache_tag} ")
