"""Whether all ranks can write where results go, and see there what the others wrote."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from pathlib import Path

from horovod_volo.cluster.topology import cpu_ranges
from horovod_volo.cluster.world import World
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.doctor.finding import Finding, failure, ok, warning

SLOW_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0  # network file systems show others' files after a while
_POLL_SECONDS = 0.05
_REMEDY = "Name a folder that every host has from the same file server: --shared here, --output for training."


def look_at_shared_folder(folder: Path, world: World) -> list[Finding]:
    """Write, let every rank read what all wrote, and leave nothing. Collective: every rank calls this."""
    token = world.broadcast_object(secrets.token_hex(8))
    made: list[Path] = []
    problem, began = "", time.monotonic()
    mine = _file(folder, token, world.rank)
    try:
        try:
            made = _make(folder)
            with atomic_write(mine) as file:
                file.write(token.encode())
        except OSError as error:
            problem = error.strerror or str(error)
        wrote = world.allgather_object((problem, time.monotonic() - began, socket.gethostname()))
        there = [rank for rank, (other, _, _) in enumerate(wrote) if not other]
        unseen, waited = _wait_for(folder, token, there)
        slowest = max(world.allgather_object(waited))
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()
    world.allgather_object(None)  # what others made may go when all are out of it
    for path in reversed(made):
        with contextlib.suppress(OSError):  # somebody else has begun to use it
            path.rmdir()
    if problem:
        return [
            failure(
                "shared folder", f"{folder}: nothing can be written there: {problem}", _unwritable(folder)
            )
        ]
    if unseen:
        return [
            failure("shared folder", _not_shared(folder, unseen, [host for _, _, host in wrote]), _REMEDY)
        ]
    return [judge_times(folder, max(seconds for _, seconds, _ in wrote), slowest, world.size)]


def judge_times(folder: Path, writing: float, seeing: float, ranks: int) -> Finding:
    """Say whether the folder is fast enough to keep checkpoints in."""
    told = f"{folder}: a file is on the disk after {_duration(writing)}"
    if ranks > 1:
        told += f", and seen by all ranks after {_duration(seeing)} more"
    if max(writing, seeing) > SLOW_SECONDS:
        return warning("shared folder", told, "Training waits for its checkpoints: name a faster folder.")
    return ok("shared folder", told)


def _file(folder: Path, token: str, rank: int) -> Path:
    return folder / f".doctor-{token}-{rank}"


def _make(folder: Path) -> list[Path]:
    """Make a folder; return what had to be made, from the outermost on."""
    made = []
    for path in reversed([folder, *folder.parents]):
        try:
            path.mkdir()
        except OSError:
            if not path.is_dir():
                raise
        else:
            made.append(path)
    return made


def _wait_for(folder: Path, token: str, ranks: list[int]) -> tuple[list[int], float]:
    """Return whose files do not come, and how long the last of the others took."""
    began = time.monotonic()
    unseen = list(ranks)
    while True:
        unseen = [rank for rank in unseen if not _is_there(_file(folder, token, rank), token)]
        waited = time.monotonic() - began
        if not unseen or waited > _PATIENCE_SECONDS:
            return unseen, waited
        time.sleep(_POLL_SECONDS)


def _is_there(file: Path, token: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == token
    except OSError:
        return False


def _not_shared(folder: Path, unseen: list[int], hosts: list[str]) -> str:
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in unseen))
    ranks = f"rank{'s' if len(unseen) > 1 else ''} {cpu_ranges(unseen)} (on {names})"
    return f"{folder}: is not shared: what {ranks} wrote there is not seen"


def _unwritable(folder: Path) -> str:
    return (
        f"Mount it for writing, and give it to this user (`ls -ld {folder}`); or name another: "
        "--shared here, --output for training."
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
