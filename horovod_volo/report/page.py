"""The page: its sections, with style sheet and script inside. It is one file, and requests no other.

A policy in its head forbids requests, so that a mistake here cannot make one either.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from horovod_volo.report.curves import Charts
from horovod_volo.report.markup import Markup, element
from horovod_volo.report.run_files import RunFiles
from horovod_volo.report.scaling import scaling
from horovod_volo.report.sections import quality, speed, training
from horovod_volo.report.settings_tables import environment, recipe
from horovod_volo.report.summary import summary
from horovod_volo.report.worst_classes import worst_classes

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def build_page(runs: Sequence[RunFiles], data_dir: str = "") -> str:
    """Return the page of runs; `data_dir` is where their data is now, if it has moved."""
    charts = Charts(runs)
    contents = {
        "At a glance": summary(runs),
        "Quality on held-out images": quality(charts),
        "Training": training(charts),
        "Speed": speed(charts),
        "Scaling": scaling(runs),
        "Worst classes": worst_classes(runs, data_dir),
        "Environment": environment(runs),
        "Recipe": recipe(runs),
    }
    names = ", ".join(run.name for run in runs)
    title = f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs: {names}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{title}: horovod-volo report"),
        element("style", Markup(_resource("page.css"))),
    )
    links, sections = [], []
    for heading, content in contents.items():
        if not content:
            continue
        anchor = heading.lower().replace(" ", "-")
        links.append(element("li", element("a", heading, href=f"#{anchor}")))
        sections.append(
            element("section", element("h2", heading, id=anchor), content, aria_labelledby=anchor)
        )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = element(
        "body",
        element("a", "To the content", href="#content", class_="skip"),
        element(
            "header",
            element("h1", title),
            element("p", f"horovod-volo report, {written}"),
            element("button", "Dark or light", id="theme", type="button", hidden=True),
        ),
        element("nav", element("ul", *links), aria_label="Sections"),
        element("main", *sections, id="content"),
        element("script", Markup(_resource("page.js"))),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _resource(name: str) -> str:
    return files("horovod_volo.report").joinpath(name).read_text(encoding="utf-8")
