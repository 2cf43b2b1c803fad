"""A page of the report as its parts: what it requests, its texts, and its tables."""

import html.parser

_VOID = ("meta", "img", "br", "col")
_ADDRESSES = ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "formaction")


class ParsedPage(html.parser.HTMLParser):
    """Collects what is asked of a page; raises AssertionError if its elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.addresses: list[str] = []
        self.words: list[tuple[str, str]] = []  # the innermost element, and its text
        self.tables: dict[str, list[list[str]]] = {}  # by caption: their rows
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        self.addresses += [found[name] for name in _ADDRESSES if name in found]
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "caption":
            self._caption = ""
        elif tag == "tbody":
            self.tables[self._caption] = []
        elif tag == "tr" and "tbody" in self._open:
            self.tables[self._caption].append([])
        elif tag in ("td", "th") and "tbody" in self._open:
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self._open[-1] if self._open else ""
        self.words.append((tag, data))
        if tag == "caption":
            self._caption += data
        elif tag in ("td", "th") and "tbody" in self._open:
            self.tables[self._caption][-1][-1] += data

    def texts(self, tag: str) -> list[str]:
        return [text for name, text in self.words if name == tag]

    @property
    def text(self) -> str:
        """Return all that a reader may see."""
        return "\n".join(text for tag, text in self.words if tag not in ("script", "style"))

    def column(self, caption: str, number: int = 1) -> dict[str, str]:
        """Return a column of the table with this caption, by the first one."""
        return {row[0]: row[number] for row in self.tables[caption]}
