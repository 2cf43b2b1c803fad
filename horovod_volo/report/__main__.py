"""Write a page about one run, or several beside each other: curves, speed, settings, worst classes.

    python -m horovod_volo.report runs/volo_d1
    python -m horovod_volo.report runs/volo_d1 runs/volo_d1_lr --html compared.html
    python -m horovod_volo.report runs/volo_d1 --pdf volo_d1.pdf

The page is one HTML file that requests no other, so it can be sent and kept. A run may still be training.
Exit status: 0 done; 2 a mistake in the command line or a damaged run folder, explained in one message.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser
from horovod_volo.core.atomic_file import write_text
from horovod_volo.core.errors import UserError, escape_controls, print_error

DONE, MISTAKE = 0, 2
PAGE = "report.html"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_BROWSER_SECONDS = 120

# Heavy modules are imported where they are used, so that --help answers at once.


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit status."""
    try:
        _report(build_parser().parse_args(arguments))
    except UserError as problem:
        print_error(f"error: {problem}")
        return MISTAKE
    return DONE


def build_parser() -> Parser:
    """Build the parser."""
    parser = Parser(prog="python -m horovod_volo.report", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, as runs/NAME")
    add("--html", default="", metavar="FILE", help=f"the page (default: {PAGE} in the first RUN)")
    add("--pdf", default="", metavar="FILE", help="also print the page to PDF, with Chromium or Chrome")
    add(
        "--data-dir",
        default="",
        metavar="DIR",
        help="data folder of the runs, if it has moved: pictures of the worst classes are read from it",
    )
    return parser


def _report(options: argparse.Namespace) -> None:
    from horovod_volo.report.page import build_page
    from horovod_volo.report.run_folder import read_runs

    browser = _find_browser() if options.pdf else ""
    runs = read_runs(options.runs)
    page = Path(options.html) if options.html else Path(options.runs[0]) / PAGE
    text = build_page(runs, options.data_dir)
    write_text(page, text, "--html")
    print(escape_controls(f"{page} ({len(text) / 1e6:.1f} MB): open it in a browser"))
    if browser:
        _print_page(browser, page, Path(options.pdf))
        print(escape_controls(f"{options.pdf}: the same page as PDF"))


def _find_browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise UserError(
            f"--pdf needs a browser, and there is none of {', '.join(BROWSERS)} on PATH. Install one, for "
            "example with `apt-get install chromium`, or open the HTML page in any browser and print it."
        )
    return found


def _print_page(browser: str, page: Path, pdf: Path) -> None:
    # A process of the browser that ends later may still write into its profile.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        partial = Path(profile) / "page.pdf"
        flags = ["--headless", "--disable-gpu", "--disable-background-networking", "--no-pdf-header-footer"]
        # The sandbox does not work for root. The browser opens only this page, which can request nothing.
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [browser, *flags, f"--user-data-dir={profile}", f"--print-to-pdf={partial}"]
        command.append(page.absolute().as_uri())
        try:
            subprocess.run(command, capture_output=True, timeout=_BROWSER_SECONDS, check=True)
            shutil.copyfile(partial, pdf)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                f"--pdf: {browser} has not printed to {pdf}: {error}. Name another file, or open {page} in a "
                "browser and print it."
            ) from None


if __name__ == "__main__":
    sys.exit(run_until_signal(main, "the report is stopped"))
