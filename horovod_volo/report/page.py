"""The page: its sections, with style sheet and script inside. It is one file, and requests no other.

A policy in its head forbids requests, so that a mistake here cannot make one either.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files

from horovod_volo.report.curves import Charts
from horovod_volo.report.markup import Markup, element, joined
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
    sections = {
        "At a glance": summary(runs),
        "Quality on held-out images": quality(charts),
        "Training": training(charts),
        "Speed": speed(charts),
        "Scaling": scaling(runs),
        "Worst classes": worst_classes(runs, data_dir),
        "Environment": environment(runs),
        "Recipe": recipe(runs),
    }
    present = {title: content for title, content in sections.items() if content}
    return f"<!doctype html>\n{_document(runs, present)}\n"


def _document(runs: Sequence[RunFiles], sections: dict[str, Markup]) -> Markup:
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
        _contents(list(sections)),
        element("main", *(_section(name, content) for name, content in sections.items()), id="content"),
        element("script", Markup(_resource("page.js"))),
    )
    return element("html", head, body, lang="en")


def _contents(titles: Sequence[str]) -> Markup:
    links = (element("li", element("a", title, href=f"#{_anchor(title)}")) for title in titles)
    return element("nav", element("ul", *links), aria_label="Sections")


def _section(title: str, content: Markup) -> Markup:
    heading = element("h2", title, id=_anchor(title))
    return element("section", joined([heading, content]), aria_labelledby=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _resource(name: str) -> str:
    return files("horovod_volo.report").joinpath(name).read_text(encoding="utf-8")
