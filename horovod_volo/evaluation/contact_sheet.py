"""Writes a page that shows images with their predicted classes. It is one file, and requests no other."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.core.atomic_file import write_text
from horovod_volo.data.images.image_bytes import decoded_rgb
from horovod_volo.evaluation.predictions import Classes
from horovod_volo.monitor.pictures import inlined_jpeg

_THUMBNAIL = (320, 240)  # pixels
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; --line: #8886; }
body { margin: 1.5rem; }
h1 { font-size: 1.3rem; }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }
figure { margin: 0; padding: .7rem; border: 1px solid var(--line); border-radius: 6px; break-inside: avoid; }
img { width: 100%; height: 12rem; object-fit: contain; }
figcaption { overflow-wrap: anywhere; font-weight: 600; margin: .4rem 0; }
ol { list-style: none; margin: 0; padding: 0; }
li { display: grid; grid-template-columns: 1fr auto; column-gap: .5rem; margin-top: .3rem; }
meter { grid-column: 1 / 3; width: 100%; height: .7rem; }
"""


def write_contact_sheet(path: Path, weights: str, predictions: Sequence[tuple[Path, Classes]]) -> None:
    """Write the page; raise UserError if that is impossible."""
    title = html.escape(f"{len(predictions):,} images, predicted by {weights}")
    page = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1><main>",
        *(_figure(file, classes) for file, classes in predictions),
        "</main></body></html>\n",
    ]
    write_text(path, "\n".join(page), "--html")


def _figure(file: Path, classes: Classes) -> str:
    rows = [
        f"<li><span>{html.escape(name)}</span><span>{100 * share:.1f} %</span>"
        f'<meter value="{share:.4f}" aria-label="{html.escape(name)}"></meter></li>'
        for name, share in classes
    ]
    name, small = html.escape(file.name), decoded_rgb(file.read_bytes())
    small.thumbnail(_THUMBNAIL)
    return (
        f'<figure><img loading="lazy" src="{inlined_jpeg(small)}" alt="{name}">'
        f"<figcaption>{name}</figcaption><ol>{''.join(rows)}</ol></figure>"
    )
