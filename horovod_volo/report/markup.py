"""HTML and SVG as text. Every text is escaped, unless it is `Markup`, which `element` returns."""

import html
from collections.abc import Iterable, Sequence

_WITHOUT_END = ("meta", "img", "br", "col")


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return text as HTML. What UTF-8 cannot encode, as in the name of a file, becomes a question mark."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(text.encode("utf-8", "replace").decode()))


def joined(parts: Iterable[str]) -> Markup:
    """Return parts one after the other, escaped."""
    return Markup("".join(map(escaped, parts)))


def element(tag: str, *children: str, **attributes: str | float | bool | None) -> Markup:
    """Return an element. None and False leave an attribute out; `class_` is class, `data_x` is data-x.

    Numbers that are not whole have one decimal.
    """
    written = ""
    for name, value in attributes.items():
        if value is not None and value is not False:
            written += f" {name.rstrip('_').replace('_', '-')}"
        if not isinstance(value, bool | None):
            written += f'="{escaped(f"{value:.1f}" if isinstance(value, float) else str(value))}"'
    end = "" if tag in _WITHOUT_END else f"</{tag}>"
    return Markup(f"<{tag}{written}>{joined(children)}{end}")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str, numeric: bool = False
) -> Markup:
    """Return a table, whose first column names the rows, that scrolls sideways where it is too wide."""
    header = element("tr", *(element("th", text, scope="col") for text in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", text) for text in row[1:]))
        for row in rows
    ]
    parts = element("caption", caption), element("thead", header), element("tbody", *body)
    content = element("table", *parts, class_="numeric" if numeric else None)
    return element("div", content, class_="scroll", role="region", aria_label=caption, tabindex="0")


def folded(summary: str, *content: str) -> Markup:
    """Return content that is shown when its summary is clicked."""
    return element("details", element("summary", summary), *content)
