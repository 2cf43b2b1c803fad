"""What the system tells of itself in small files, as sysfs and procfs do."""

from __future__ import annotations

from pathlib import Path


def fact(file: Path) -> str:
    """Return what a file says, without the space around it; nothing where there is none to be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
