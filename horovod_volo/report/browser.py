"""Prints a page to PDF with a browser of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from horovod_volo.core.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_SECONDS = 120
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-pdf-header-footer",
)


def find_browser() -> str:
    """Return the program of a browser; raise UserError if there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UserError(
            f"--pdf needs a browser, and there is none of {', '.join(BROWSERS)} on PATH. Install one, for "
            "example with `apt-get install chromium`, or open the HTML page in any browser and print it."
        )
    return found


def print_page(browser: str, page: Path, pdf: Path) -> None:
    """Write a page as PDF; raise UserError if that is not possible."""
    # A process of the browser that ends later may still write into its profile.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        partial = Path(profile) / "page.pdf"
        # Chromium's sandbox does not work for root. It opens only this page, which can request nothing.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [browser, *_FLAGS, *sandbox, f"--user-data-dir={profile}", f"--print-to-pdf={partial}"]
        try:
            done = subprocess.run(
                [*command, page.absolute().as_uri()],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
            problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            is_printed = done.returncode == 0 and partial.is_file()
        except (OSError, subprocess.TimeoutExpired) as error:
            problem, is_printed = str(error), False
        if not is_printed:
            raise UserError(
                f"{browser} has not printed the page: {problem}. Open {page} in a browser and print it to a "
                "file."
            )
        try:
            shutil.copyfile(partial, pdf)
        except OSError as error:
            raise UserError(f"--pdf cannot write {pdf}: {error.strerror}. Name another file.") from None
