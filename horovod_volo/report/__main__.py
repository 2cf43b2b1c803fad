"""Write a page about one run, or several beside each other: curves, speed, settings, worst classes.

    horovod-volo report runs/volo_d1
    horovod-volo report runs/volo_d1 runs/volo_d1_lr --html compared.html

The page is one HTML file that requests no other, so it can be sent and kept. A run may still be training.
Exit status: 0 done; 2 a mistake in the command line or a damaged run folder, explained in one message.
"""

from collections.abc import Sequence
from pathlib import Path

from horovod_volo.cluster.stop_signals import run_until_signal
from horovod_volo.config.arguments import Parser
from horovod_volo.core.atomic_file import write_text
from horovod_volo.core.errors import escape_controls, refuse_mistakes

DONE = 0
PAGE = "report.html"

# Heavy modules are imported where they are used, so that --help answers at once.


@refuse_mistakes
def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit status."""
    options = build_parser().parse_args(arguments)
    from horovod_volo.report.page import build_page
    from horovod_volo.report.run_folder import read_runs

    runs = read_runs(options.runs)
    page = Path(options.html) if options.html else Path(options.runs[0]) / PAGE
    text = build_page(runs, options.data_dir)
    write_text(page, text, "--html")
    print(escape_controls(f"{page} ({len(text) / 1e6:.1f} MB): open it in a browser"))
    return DONE


def build_parser() -> Parser:
    parser = Parser(prog="horovod-volo report", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run folder, as runs/NAME")
    add("--html", default="", metavar="FILE", help=f"the page (default: {PAGE} in the first RUN)")
    data = "data folder of the runs, if it has moved: pictures of the worst classes are read from it"
    add("--data-dir", default="", metavar="DIR", help=data)
    return parser


if __name__ == "__main__":
    run_until_signal(main, "the report is stopped")
