"""Draw the figures of the documentation: one of measured results, and drawings that explain.

A figure has a background of its own and two sets of colours, so that it can be read on a light and on a dark
page; it is drawn at the width of a column, so that its text can be read on a phone.
tests/style/test_docs_site.py compares the files with what this program draws. `./tools/docs generate`
calls it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from horovod_volo.bench.results import read_records

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
WIDTH = 520
_STYLE = """
    text { font: 14px system-ui, "Segoe UI", "Noto Sans", "Liberation Sans", sans-serif; fill: #1f2937 }
    .title { font-weight: 600 }
    .small { font-size: 12px }
    .middle { text-anchor: middle }
    .right { text-anchor: end }
    .back { fill: #ffffff; stroke: #d1d5db }
    .line { stroke: #4b5563; stroke-width: 1.5; fill: none }
    .dash { stroke: #4b5563; stroke-width: 1.5; fill: none; stroke-dasharray: 4 3 }
    .grid { stroke: #ffffff; stroke-width: 1.5 }
    .grey { fill: #d1d5db }
    .blue { fill: #93c5fd }
    .orange { fill: #fdba74 }
    .green { fill: #86efac }
    .pink { fill: #f9a8d4 }
    .red { fill: #dc2626 }
    .box { stroke: #b91c1c; stroke-width: 3; fill: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e5e7eb }
      .back { fill: #1b2027; stroke: #4b5563 }
      .line, .dash { stroke: #9ca3af }
      .grid { stroke: #1b2027 }
      .grey { fill: #4b5563 }
      .blue { fill: #1d4ed8 }
      .orange { fill: #9a4a0c }
      .green { fill: #15703a }
      .pink { fill: #9d2463 }
      .red { fill: #f87171 }
      .box { stroke: #f87171 }
    }"""


def figures() -> dict[str, str]:
    """Return the text of each figure by its file name."""
    drawn = (step_exchange, race, token_labels, mix_token, gradient_exchange, sample_order)
    return {f"{draw.__name__}.svg": draw() for draw in drawn}


class Drawing:
    """Shapes in an SVG file of one width, with a description for readers who do not see it."""

    def __init__(self, height: int, title: str, description: str) -> None:
        """Begin an empty drawing."""
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="t d">\n'
            f'  <title id="t">{escape(title)}</title>\n  <desc id="d">{escape(description)}</desc>\n'
            f"  <style>{_STYLE}\n  </style>"
        )
        self._parts = [
            f'<rect class="back" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        ]

    def rect(self, style: str, x: float, y: float, width: float, height: float, round_: float = 0) -> None:
        """Draw a rectangle."""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_:g}"'
        self._parts.append(f'<rect class="{style}" {place}/>')

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write text whose baseline begins at a point."""
        class_ = f' class="{style}"' if style else ""
        self._parts.append(f'<text{class_} x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def grid(self, rows: Sequence[Sequence[str]], x: float, y: float, cell: float, round_: float) -> None:
        """Draw rows of square cells, each given by its style."""
        for row, styles in enumerate(rows):
            for column, style in enumerate(styles):
                self.rect(style, x + cell * column, y + cell * row, cell - 2, cell - 2, round_)

    def path(self, style: str, path: str) -> None:
        """Draw a path."""
        self._parts.append(f'<path class="{style}" d="{path}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw a horizontal or vertical arrow."""
        self.path("line", f"M{x:g} {y:g}L{to_x:g} {to_y:g}")
        back = 6 if to_x > x or to_y > y else -6
        if to_y == y:
            self.path("line", f"M{to_x - back:g} {y - 4:g}L{to_x:g} {y:g}L{to_x - back:g} {y + 4:g}")
        else:
            self.path("line", f"M{x - 4:g} {to_y - back:g}L{x:g} {to_y:g}L{x + 4:g} {to_y - back:g}")

    def svg(self) -> str:
        """Return the file's text."""
        return "\n  ".join([self._head, *self._parts]) + "\n</svg>\n"


# --- measured -----------------------------------------------------------------------------------


def step_exchange() -> str:
    """Draw how long a step of two ranks waits for the exchange of gradients, by four methods."""
    record = {item["name"]: item for item in read_records()}["reduce volo_d1 64 px"]
    values = {figure["label"]: figure["value"] for figure in record["figures"]}
    rows = [
        ("no exchange", 0.0, "grey"),
        ("horovod_volo", values["ours: exposed"], "green"),
        ("stock Horovod", values["stock Horovod: exposed"], "blue"),
        ("torch DDP", values["torch DDP: exposed"], "blue"),
        ("after backward", values["after backward: exposed"], "blue"),
    ]
    compute = values["no exchange: step"]
    drawing = Drawing(
        262,
        "A training step of VOLO-D1 on two CPU ranks",
        f"Computation takes {compute:.0f} ms. The exchange of gradients adds "
        + ", ".join(f"{added:.0f} ms with {name}" for name, added, _ in rows[1:])
        + ".",
    )
    drawing.text(16, 28, "A step of VOLO-D1 on two CPU ranks: what the exchange adds", "title")
    left, scale = 132, 1.22
    for number, (name, added, colour) in enumerate(rows):
        y = 46 + 32 * number
        drawing.text(left - 10, y + 16, name, "right")
        drawing.rect("grey", left, y, compute * scale, 22)
        end = left + compute * scale
        if added:
            drawing.rect(colour, end, y, added * scale, 22)
            drawing.text(end + added * scale + 6, y + 16, f"+ {added:.0f} ms")
        else:
            drawing.text(left + 8, y + 16, f"{compute:.0f} ms of computation")
    drawing.text(16, 226, "64 px, 2 images and one core of an AMD EPYC for each rank, MPI;", "small")
    drawing.text(16, 246, f"measured by bench reduce at {record['commit'][:7]}; see docs/results.md", "small")
    return drawing.svg()


def race() -> str:
    """Draw the accuracies over time of each run of the first race in race.txt."""
    title, *lines = (FOLDER / "race.txt").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    curves = [[float(number) for number in re.findall(r"([\d.]+) [s%]", line)] for line in lines]
    longest = max(curve[-2] for curve in curves)
    drawing = Drawing(290, "The race to an accuracy", f"{title}; the slowest run ends after {longest:.0f} s.")
    drawing.text(16, 28, "Top-1 over seconds from the command on, five seeds a side", "title")
    left, bottom, across, up = 56, 246, 440 / longest, 200 / 70
    for percent in range(0, 71, 10):
        drawing.path("back", f"M{left} {bottom - up * percent:g}h448")
        drawing.text(left - 8, bottom - up * percent + 5, f"{percent} %", "small right")
    for seconds in range(0, int(longest) + 1, 100):
        drawing.text(left + across * seconds, bottom + 18, f"{seconds}", "small middle")
    for line, curve in zip(lines, curves, strict=True):
        points = zip(curve[::2], curve[1::2], strict=True)
        path = "L".join(f"{left + across * x:.1f} {bottom - up * y:.1f}" for x, y in points)
        drawing.path("line" if line.startswith("ours") else "dash", f"M{path}")
    drawing.text(16, 282, "Solid: horovod_volo. Dashed: timm with AdamW. See docs/race.md", "small")
    return drawing.svg()


# --- explanations -------------------------------------------------------------------------------

SCENE = ("SSSSTT", "SSSTTT", "SSSTTT", "SDDSTT", "DDDDTT", "DDDDTT")
COLOURS = {"S": "blue", "T": "green", "D": "orange"}


def token_labels() -> str:
    """Draw an image's label map, a crop of it, and the labels that the tokens of the crop get."""
    drawing = Drawing(
        270,
        "Token labels",
        "A teacher labels each cell of an image. A random crop of the image takes its part of the map, and "
        "each token of the crop is trained on the label of its own place.",
    )
    drawing.text(16, 28, "The label of a token is what the teacher saw at its place", "title")
    cell = 27
    scene = [[COLOURS[name] for name in names] for names in SCENE]
    drawing.grid(scene, 16, 64, cell, 3)
    drawing.text(16, 56, "label map of the image", "small")
    drawing.rect("box", 16 + cell, 64 + 2 * cell, 4 * cell - 2, 4 * cell - 2)
    drawing.arrow(190, 145, 226, 145)
    drawing.text(208, 134, "crop", "small middle")
    drawing.grid([colours[1:5] for colours in scene[2:6]], 236, 73, 36, 3)
    drawing.text(236, 62, "labels of the tokens", "small")
    for number, name in enumerate(("sky", "tree", "dog")):
        drawing.rect(COLOURS[name[0].upper()], 402, 80 + 26 * number, 16, 16, 3)
        drawing.text(426, 93 + 26 * number, name)
    for y, text in ((178, "class token:"), (196, "the class of"), (214, "the image")):
        drawing.text(402, y, text, "small")
    drawing.text(16, 254, "Each cell holds the teacher's five best classes and their logits.", "small")
    return drawing.svg()


def mix_token() -> str:
    """Draw how MixToken swaps a box of tokens, and swaps it back before the token head."""
    drawing = Drawing(
        262,
        "MixToken",
        "After the stem an image and its partner swap a box of tokens. The network computes on the mixed "
        "tokens. Before the token head the box is swapped back, so that token labels need no mixing.",
    )
    drawing.text(16, 28, "MixToken: two images swap a box of tokens, and swap it back", "title")
    titles = ("tokens after the stem", "in the transformers", "at the token head")
    for stage, title in enumerate(titles):
        left = 16 + 176 * stage
        drawing.text(left, 54, title, "small")
        for image, own, partner in ((0, "orange", "blue"), (1, "blue", "orange")):
            mixed = [own, *[partner if stage == 1 else own] * 3]
            drawing.grid([[own] * 4, mixed, mixed, [own] * 4], left, 64 + 92 * image, 20, 2)
            drawing.rect("box", left + 20, 84 + 92 * image, 58, 38)
        if stage < 2:
            drawing.text(left + 128, 120, ("swap", "swap back")[stage], "small middle")
            drawing.arrow(left + 98, 130, left + 158, 130)
    drawing.text(16, 252, "6 of 16 tokens are swapped: the target is 62.5 % own, 37.5 % partner.", "small")
    return drawing.svg()


def gradient_exchange() -> str:
    """Draw the buckets of a step: an all-reduce runs while backward computes the next bucket."""
    drawing = Drawing(
        292,
        "The exchange of gradients during backward",
        "Backward computes gradients from the last layer to the first. As soon as all gradients of a bucket "
        "are ready, its all-reduce starts, while backward goes on. Only the reduction of the last, small "
        "bucket is exposed, before the optimizer updates the weights.",
    )
    drawing.text(16, 28, "Buckets are reduced while backward is still computing", "title")
    drawing.text(16, 60, "backward, from the last layer to the first", "small")
    buckets = (("green", 4, 100), ("blue", 3, 76), ("pink", 2, 38), ("orange", 1, 22))
    x, free, first = 16.0, 0.0, 16.0
    for number, (colour, layers, length) in enumerate(buckets):
        begin = x
        for _ in range(layers):
            drawing.rect(colour, x, 68, 34, 30, 3)
            x += 36
        ready = x - 2
        start = max(ready + 6, free)
        drawing.path("dash", f"M{ready:g} 98L{ready:g} 118L{start + 4:g} 118L{start + 4:g} 132")
        drawing.rect(colour, start, 134, length, 30, 3)
        free = start + length + 4
        drawing.text((begin + ready) / 2, 88, f"{number + 1}", "middle")
        drawing.text(start + length / 2, 154, f"{number + 1}", "middle")
    drawing.text(16, 154, "all-reduce of", "small")
    drawing.text(16, 170, "each bucket", "small")
    end_backward, end_exchange = x - 2, free - 4
    drawing.path("dash", f"M{end_backward:g} 62V106M{end_backward:g} 168V226")
    drawing.path("dash", f"M{end_exchange:g} 128L{end_exchange:g} 226")
    drawing.rect("red", end_backward, 206, end_exchange - end_backward, 6)
    drawing.text(end_backward - 8, 213, "exposed: backward is over, the update must wait", "small right")
    drawing.rect("grey", end_exchange + 4, 134, 512 - end_exchange - 12, 30, 3)
    drawing.text((end_exchange + 508) / 2, 154, "update", "small middle")
    drawing.arrow(first, 246, 504, 246)
    drawing.text(504, 264, "time", "small right")
    drawing.text(16, 278, "Buckets are sent in fp16, scaled by a power of two. The last is small.", "small")
    return drawing.svg()


def sample_order() -> str:
    """Draw the order of an epoch, cut into global batches, and the ranks that take the images of a step."""
    order = (9, 2, 14, 5, 0, 11, 7, 12, 3, 15, 8, 1, 10, 6, 13, 4)
    drawing = Drawing(
        318,
        "The order of samples",
        "The order of an epoch is a permutation that depends on the seed and the epoch. A step takes the "
        "next global batch of it, and its images are dealt to the ranks in turn. Two ranks and four ranks "
        "train on the same images in the same step.",
    )
    drawing.text(16, 28, "A step takes the next images of the epoch's order", "title")
    drawing.text(16, 54, "order of an epoch: a permutation computed from seed and epoch", "small")
    cell, left = 30, 20
    for place, image in enumerate(order):
        drawing.rect("grey", left + cell * place, 62, cell - 2, 28, 3)
        drawing.text(left + cell * place + 14, 81, str(image), "middle")
    for step in range(2):
        begin = left + 8 * cell * step
        drawing.path("line", f"M{begin + 1} 96v7h{8 * cell - 4}v-7")
        drawing.text(begin + 4 * cell, 120, f"step {step + 1}: global batch of 8", "small middle")
    colours = ("green", "orange", "blue", "pink")
    for y, ranks in ((142, 2), (204, 4)):
        drawing.text(left, y, f"who takes the images of step 1, with {ranks} ranks", "small")
        for place, image in enumerate(order[:8]):
            drawing.rect(colours[place % ranks], left + cell * place, y + 8, cell - 2, 28, 3)
            drawing.text(left + cell * place + 14, y + 27, str(image), "middle")
        for rank in range(ranks):
            x, down = left + 8 * cell + 32 + 96 * (rank // 2), 20 * (rank % 2)
            drawing.rect(colours[rank], x, y + 6 + down, 14, 14, 3)
            drawing.text(x + 20, y + 18 + down, f"rank {rank}", "small")
    boundary = left + 8 * cell - 1
    drawing.path("dash", f"M{boundary} 104V132M{boundary} 244V268")
    drawing.text(
        16, 284, "A run that stopped after step 1 resumes here: its place in the order is a", "small"
    )
    drawing.text(16, 302, "number, the images seen so far. Nothing else about the order is saved.", "small")
    return drawing.svg()


if __name__ == "__main__":
    for file, text in figures().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
