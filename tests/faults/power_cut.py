"""The disk states that a power cut may leave of what a program writes.

A program runs with the shim, and `Disk` replays its calls. A cut may come after any call. Of what is not
flushed by then anything may be on the disk, in any order, as in ALICE (Pillai et al., OSDI 2014): a write, a
part of it, a file's new size without its content, and a change of a folder's entries without earlier ones. A
rename is atomic, but does not flush the content of its file. Only an fsync of its folder flushes an entry.
Changes of one entry keep their order.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

SHIM = Path(__file__).with_name("disk_calls.c")
MARKS = "log.txt"  # a program's own log: it says what has been published
UNREAD = (MARKS, "events.out.")  # no reader needs these files

Content = bytes | str | None  # of a file, the target of a link, or a folder
Tree = frozenset[tuple[str, Content]]  # by path


class Write(NamedTuple):
    at: int
    data: bytes | None  # None: the file is cut, or extended, to `at`


@dataclass(eq=False)
class Node:
    """A file, a link or a folder."""

    target: str | None = None  # of a link
    is_folder: bool = False
    flushed: bytes = b""
    pending: list[Write] = field(default_factory=list)

    def contents(self) -> list[Content]:
        """Return what may be on the disk of it: first what is flushed, last all that was written."""
        if self.is_folder or self.target:
            return [self.target]
        writes, count, whole = self.pending, len(self.pending), applied(self.flushed, self.pending)
        few = sorted({*range(min(2, count)), *range(max(0, count - 2), count)})
        kept = [writes[:end] for end in few] + [writes[:gap] + writes[gap + 1 :] for gap in few]
        torn = [(writes[:end], writes[end]) for end in few if writes[end].data]
        kept += [[*before, Write(last.at, last.data[: len(last.data) // 2])] for before, last in torn]
        found = [applied(self.flushed, each) for each in kept]
        found.append(self.flushed[: len(whole)].ljust(len(whole), b"\0"))
        return [*dict.fromkeys(each for each in found if each != whole), whole]


Entries = dict[tuple[Node, str], Node | None]  # by folder and name; None: there is none any more


def applied(content: bytes, writes: Iterable[Write]) -> bytes:
    """Return the content of a file after these writes."""
    for at, data in writes:
        content = (content[:at] if data is None else content).ljust(at, b"\0")
        content = content if data is None else content[:at] + data + content[at + len(data) :]
    return content


def shim(folder: Path) -> Path:
    """Compile the library that records the calls of the program that it is preloaded into."""
    library = folder / "disk_calls.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
    return library


def record_calls(root: Path) -> None:
    """Record the calls of this program, which has the shim, under a new folder, in the file ROOT.calls."""
    root.mkdir()
    os.environ |= {"DISK_ROOT": str(root), "DISK_CALLS": f"{root}.calls"}


def tree(found: Iterable[tuple[str, Content]]) -> Tree:
    """Leave out the files that no reader needs."""
    return frozenset(item for item in found if not item[0].rpartition("/")[2].startswith(UNREAD))


def read_tree(root: Path) -> Tree:
    """Return the files, links and folders of a folder."""

    def content(path: Path) -> Content:
        return str(path.readlink()) if path.is_symlink() else None if path.is_dir() else path.read_bytes()

    return tree((str(path.relative_to(root)), content(path)) for path in root.rglob("*"))


def build_tree(state: Tree, root: Path) -> None:
    """Write a tree into a new folder."""
    root.mkdir()
    for name, content in sorted(state, key=lambda item: item[0]):
        if content is None:
            (root / name).mkdir()
        elif isinstance(content, str):
            (root / name).symlink_to(content)
        else:
            (root / name).write_bytes(content)


class Disk:
    """Replays recorded calls. Of up to log2(`choices`) changes of entries all choices are enumerated."""

    def __init__(self, root: Path, choices: int = 16) -> None:
        self.enumerated = 0
        self._root, self._most, self._random = root, choices, random.Random(0)
        self._top = Node(is_folder=True)
        self._by_file = {root.stat().st_ino: self._top}
        self._flushed, self._now = Entries(), Entries()  # on the disk, and as the program sees them
        self._pending: list[Entries] = []  # changes of entries that are not flushed
        self._marks: list[Node] = []

    def states(self) -> dict[Tree, str]:
        """Return the different states, each with all that was published by the last cut that may leave it."""
        found: dict[Tree, str] = {}
        for call in self._parsed():
            if call[0] == "fsync":  # until it, the possible states only become more
                found |= dict.fromkeys(self._states(), self._published())
            self._apply(*call)
        found |= dict.fromkeys(self._states(), self._published())
        seen = tree((name, node.contents()[-1]) for name, node in _visible(self._now, self._top))
        assert seen == read_tree(self._root), "some calls were not recorded"
        return found

    def _parsed(self) -> Iterator[tuple[str, int, int, bytes, str, str]]:
        calls, start = Path(f"{self._root}.calls").read_bytes(), 0
        while start < len(calls):
            end = calls.index(b"\n", start)
            call, file, at, size, path, second = calls[start:end].decode().split("\t")
            start = end + 1 + int(size)
            yield call, int(file), int(at), calls[end + 1 : start], path, second

    def _published(self) -> str:
        return "".join(applied(mark.flushed, mark.pending).decode() for mark in self._marks)

    def _entry(self, path: str) -> tuple[Node, str]:
        """Return the folder of a path, and the name in it."""
        folder, parts = self._top, Path(path).relative_to(self._root).parts
        for part in parts[:-1]:
            folder = self._now[folder, part] or self._top
        return folder, parts[-1]

    def _change(self, change: Entries) -> None:
        self._now |= change
        self._pending.append(change)

    def _apply(self, call: str, file: int, at: int, data: bytes, path: str, second: str) -> None:
        if call in ("write", "truncate", "fsync"):
            node = self._by_file[file]
            self._note_rename(node, path)
            if call != "fsync":
                node.pending.append(Write(at, data if call == "write" else None))
            elif node.is_folder:
                own = [n for n, change in enumerate(self._pending) if any(node is each for each, _ in change)]
                flushed = self._closed(own)
                self._flushed = self._after(flushed)
                self._pending = [change for n, change in enumerate(self._pending) if n not in flushed]
            else:
                node.flushed, node.pending = applied(node.flushed, node.pending), []
            return
        entry = self._entry(path)
        existing = self._now.get(entry)
        if call == "unlink":
            self._change({entry: None})
        elif call == "link":
            self._change({self._entry(second): existing})
        elif call == "rename":
            self._change({entry: None, self._entry(second): existing})
        elif existing is None:
            node = self._by_file[file] = Node(second if call == "symlink" else None, call == "mkdir")
            self._marks += [node] if entry[1] == MARKS else []
            self._change({entry: node})
        elif call == "new":
            existing.pending.append(Write(0, None))

    def _note_rename(self, node: Node, path: str) -> None:
        """Note a rename that was not recorded: safetensors calls the system without the C library."""
        if node is not self._top and not path.endswith(" (deleted)"):
            entry = self._entry(path)
            if self._now.get(entry) is not node:
                before = next(each for each, found in self._now.items() if found is node)
                self._change({before: None, entry: node})

    def _closed(self, chosen: Iterable[int]) -> tuple[int, ...]:
        """Add to these pending changes the earlier ones of the same entries."""
        entries, found = set[tuple[Node, str]](), set(chosen)
        for number in reversed(range(len(self._pending))):
            if number in found or entries & self._pending[number].keys():
                found.add(number)
                entries |= self._pending[number].keys()
        return tuple(sorted(found))

    def _after(self, chosen: Iterable[int]) -> Entries:
        entries = dict(self._flushed)
        for number in chosen:
            entries |= self._pending[number]
        return entries

    def _chosen(self) -> set[tuple[int, ...]]:
        """Return which pending changes are on the disk: all choices of a few, some of many."""
        numbers = range(len(self._pending))
        if 2 ** len(numbers) <= self._most:
            return {
                self._closed(each) for size in range(len(numbers) + 1) for each in combinations(numbers, size)
            }
        few = [self._random.sample(numbers, self._random.randrange(len(numbers))) for _ in range(self._most)]
        without = ({*numbers} - {each} for each in numbers)
        return set(map(self._closed, chain((numbers, []), zip(numbers), without, map(range, numbers), few)))

    def _states(self) -> Iterator[Tree]:
        """Yield states with any content of one file, while all or nothing is written of the others."""
        contents: dict[Node, list[Content]] = {}
        for chosen in self._chosen():
            visible = dict(_visible(self._after(chosen), self._top))
            for node in visible.values():
                contents[node] = contents.get(node) or node.contents()
            several = dict.fromkeys(node for node in visible.values() if len(contents[node]) > 1)
            choices = [
                dict.fromkeys(several, others) | {node: variant}
                for others in (0, -1)
                for node in several
                for variant in range(len(contents[node]))
            ]
            for variants in choices or [{}]:
                self.enumerated += 1
                yield tree((name, contents[node][variants.get(node, -1)]) for name, node in visible.items())


def _visible(entries: Entries, top: Node) -> Iterator[tuple[str, Node]]:
    """Yield the paths below a folder."""
    inside: dict[Node, list[tuple[str, Node]]] = {}
    for (folder, name), node in entries.items():
        if node is not None:
            inside.setdefault(folder, []).append((name, node))
    found = inside.get(top, [])
    for name, node in found:
        yield name, node
        found += [(f"{name}/{below}", each) for below, each in inside.get(node, ())]
