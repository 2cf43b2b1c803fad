"""Checks that all ranks can write to the folder of results, and read what the others wrote."""

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
_VISIBLE_SECONDS = 3.0  # network file systems show the files of other hosts with a delay
_POLL_SECONDS = 0.05
_REMEDY = (
    "Name a folder that every host mounts from the same file server: --shared here, --output for training."
)


def check_shared_folder(folder: Path, world: World) -> list[Finding]:
    """Write a file on every rank, read all of them, and remove them. Collective: every rank calls this."""
    token = world.broadcast_object(secrets.token_hex(8))
    created: list[Path] = []
    problem, start = "", time.monotonic()
    own_file = _file(folder, token, world.rank)
    try:
        try:
            created = _create(folder)
            with atomic_write(own_file) as file:
                file.write(token.encode())
        except OSError as error:
            problem = error.strerror or str(error)
        written = world.allgather_object((problem, time.monotonic() - start, socket.gethostname()))
        writers = [rank for rank, (other, _, _) in enumerate(written) if not other]
        invisible, waited = _wait_for_files(folder, token, writers)
        longest_wait = max(world.allgather_object(waited))
    finally:
        with contextlib.suppress(OSError):
            own_file.unlink()
    world.allgather_object(None)  # a created folder can be removed once all ranks have removed their files
    for path in reversed(created):
        with contextlib.suppress(OSError):  # somebody else has started to use it
            path.rmdir()
    if problem:
        remedy = (
            f"Mount it for writing and give this user permission (see `ls -ld {folder}`), or name another: "
            "--shared here, --output for training."
        )
        return [failure("shared folder", f"{folder}: cannot write there: {problem}", remedy)]
    if invisible:
        hosts = ", ".join(dict.fromkeys(written[rank][2] for rank in invisible))
        ranks = f"rank{'s' if len(invisible) > 1 else ''} {cpu_ranges(invisible)} (on {hosts})"
        text = f"{folder}: is not shared: the files of {ranks} are not visible"
        return [failure("shared folder", text, _REMEDY)]
    return [assess_times(folder, max(seconds for _, seconds, _ in written), longest_wait, world.size)]


def assess_times(folder: Path, write_seconds: float, visible_seconds: float, ranks: int) -> Finding:
    """Report whether the folder is fast enough for checkpoints."""
    text = f"{folder}: a file is on the disk after {_duration(write_seconds)}"
    if ranks > 1:
        text += f", and visible to all ranks {_duration(visible_seconds)} later"
    if max(write_seconds, visible_seconds) > SLOW_SECONDS:
        return warning("shared folder", text, "Training waits for its checkpoints: name a faster folder.")
    return ok("shared folder", text)


def _file(folder: Path, token: str, rank: int) -> Path:
    return folder / f".doctor-{token}-{rank}"


def _create(folder: Path) -> list[Path]:
    """Create a folder; return the folders that did not exist, outermost first."""
    created = []
    for path in reversed([folder, *folder.parents]):
        try:
            path.mkdir()
        except OSError:
            if not path.is_dir():
                raise
        else:
            created.append(path)
    return created


def _wait_for_files(folder: Path, token: str, ranks: list[int]) -> tuple[list[int], float]:
    """Return the ranks whose files stay invisible, and the time until the last of the others was visible."""
    start = time.monotonic()
    invisible = list(ranks)
    while True:
        invisible = [rank for rank in invisible if not _is_visible(_file(folder, token, rank), token)]
        waited = time.monotonic() - start
        if not invisible or waited > _VISIBLE_SECONDS:
            return invisible, waited
        time.sleep(_POLL_SECONDS)


def _is_visible(file: Path, token: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == token
    except OSError:
        return False


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
