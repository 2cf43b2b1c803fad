"""Adapts pages for the site: what GitHub resolves in the repository is outside of the site.

A link from a page to a file outside docs/ becomes the file's path as code, because the site has no such page.
"""

import re

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?!docs/)([^)#\s]+)(?:#[\w-]+)?\)")


def on_page_markdown(markdown, page, **_):
    """Replace links that leave docs/; those from a page in a folder of docs/ may go up once."""
    depth = page.file.src_uri.count("/")
    leaves = "../" * (depth + 1)
    return _OUTSIDE.sub(lambda link: _as_code(link) if f"]({leaves}" in link[0] else link[0], markdown)


def _as_code(link):
    text, path = link[1], link[2]
    return text if path in text else f"{text} (`{path}`)"
