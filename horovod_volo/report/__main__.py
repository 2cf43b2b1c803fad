"""Write a page about one run, or several beside each other: curves, speed, settings, worst classes.

    python -m horovod_volo.report runs/volo_d1
    python -m horovod_volo.report runs/volo_d1 runs/volo_d1_lr --html compared.html
    python -m horovod_volo.report runs/volo_d1 --pdf volo_d1.pdf

The page is one HTML file that requests no other, so it can be sent and kept. A run may still be training.
Exit status: 0 done; 2 a mistake in the command line or a damaged run folder, explained in one message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError, escape_controls, print_error

DONE, MISTAKE = 0, 2
PAGE = "report.html"

# Heavy modules are imported where they are used, so that --help answers at once.


def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit status."""
    try:
        return _report(build_parser().parse_args(arguments))
    except UserError as problem:
        print_error(f"error: {problem}")
        return MISTAKE


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


def _report(options: argparse.Namespace) -> int:
    from horovod_volo.report.browser import find_browser, print_page
    from horovod_volo.report.page import build_page
    from horovod_volo.report.run_files import read_runs

    browser = find_browser() if options.pdf else ""
    runs = read_runs(options.runs)
    page = Path(options.html) if options.html else Path(options.runs[0]) / PAGE
    text = build_page(runs, options.data_dir)
    try:
        with atomic_write(page) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"--html cannot write {page}: {error.strerror}. Name another file.") from None
    print(escape_controls(f"{page} ({len(text) / 1e6:.1f} MB): open it in a browser"))
    if browser:
        print_page(browser, page, Path(options.pdf))
        print(escape_controls(f"{options.pdf}: the same page as PDF"))
    return DONE


if __name__ == "__main__":
    sys.exit(run_until_signal(main, "the report is stopped"))
