"""The disk states that a power cut may leave of what a program writes.

A program runs with the shim, and `Disk` replays its calls. A cut may come after any call. Of what is not
flushed by then anything may be on the disk, in any order, as in ALICE (Pillai et al., OSDI 2014): a write, a
part of it, a file's new size without its content, and a change of a folder's entries without earlier ones. A
rename is atomic, but does not flush the content of its file. Only an fsync of its folder flushes an entry.
Changes of one entry keep their order.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SHIM = Path(__file__).with_name("disk_calls.c")
MARKS = "log.txt"  # a program's own log: what it says has been published
UNREAD = (MARKS, "events.out.")  # no reader needs these files

Content = bytes | str | None  # of a file, the target of a link, or a folder
Tree = frozenset[tuple[str, Content]]  # by path
Entry = tuple[int, str]  # number of a folder, and a name in it
Change = dict[Entry, "Node | None"]


class Write(NamedTuple):
    at: int
    data: bytes | None  # None: the file is cut, or extended, to `at`


@dataclass(eq=False)
class Node:
    """A file, a link or a folder, with what is flushed of it and what is not."""

    number: int
    target: str | None = None  # of a link
    is_folder: bool = False
    flushed: bytes = b""
    pending: list[Write] = field(default_factory=list)
    now: dict[str, Node] = field(default_factory=dict)  # the entries of a folder that the program sees
    place: tuple[Node, str] = field(init=False)  # the last folder and name

    def contents(self) -> list[bytes]:
        """Return what the file may hold, all that was written at the end, and nothing of it first."""
        count, whole = len(self.pending), applied(self.flushed, self.pending)
        few = sorted({*range(min(2, count)), *range(max(0, count - 2), count)})
        kept = [self.pending[:end] for end in few]
        kept += [self.pending[:skipped] + self.pending[skipped + 1 :] for skipped in few]
        kept += [
            [*self.pending[:end], Write(last.at, last.data[: len(last.data) // 2])]
            for end in few
            if (last := self.pending[end]).data
        ]
        found = [applied(self.flushed, writes) for writes in kept]
        found.append(self.flushed[: len(whole)].ljust(len(whole), b"\0"))
        return [*dict.fromkeys(each for each in found if each != whole), whole]


def applied(content: bytes, writes: Iterable[Write]) -> bytes:
    """Return the content of a file after these writes."""
    for at, data in writes:
        content = content[: at if data is None else None].ljust(at, b"\0")
        content = content if data is None else content[:at] + data + content[at + len(data) :]
    return content


def shim(folder: Path) -> Path:
    """Compile the library that records calls of the program that it is preloaded into."""
    library = folder / "disk_calls.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
    return library


def record_calls(root: Path) -> None:
    """Record the calls of this program, which runs with the shim, under a new folder in ROOT.calls."""
    root.mkdir()
    os.environ |= {"DISK_ROOT": str(root), "DISK_CALLS": f"{root}.calls"}


def read_tree(root: Path) -> Tree:
    """Return the files, links and folders of a folder."""
    found = {
        str(path.relative_to(root)): str(path.readlink())
        if path.is_symlink()
        else None
        if path.is_dir()
        else path.read_bytes()
        for path in root.rglob("*")
    }
    return read(found)


def read(found: dict[str, Content]) -> Tree:
    """Leave out the files that no reader needs."""
    return frozenset(item for item in found.items() if not item[0].rpartition("/")[2].startswith(UNREAD))


def build_tree(tree: Tree, root: Path) -> None:
    """Write a tree into a new folder."""
    root.mkdir()
    for name, content in sorted(tree, key=lambda item: item[0]):
        if content is None:
            (root / name).mkdir()
        elif isinstance(content, str):
            (root / name).symlink_to(content)
        else:
            (root / name).write_bytes(content)


class Disk:
    """Replays recorded calls."""

    def __init__(self, root: Path, *, wide: bool = False, seed: int = 0) -> None:
        self.calls = Path(f"{root}.calls").read_bytes()
        self.enumerated = 0
        self._root, self._wide, self._random = root, wide, random.Random(seed)
        self._numbers = itertools.count()
        self._top = Node(next(self._numbers), is_folder=True)
        self._by_file = {root.stat().st_ino: self._top}
        self._entries: Change = {}  # flushed
        self._pending: list[Change] = []
        self._marks: list[Node] = []

    def states(self) -> dict[Tree, str]:
        """Return the different states after all cuts, with all that was published by the last such cut."""
        found: dict[Tree, str] = {}
        for call in self._parsed():
            # What may be on the disk grows until the next flush.
            if call[0] == "fsync" or self._wide:
                found |= dict.fromkeys(self._states(), self._published())
            self._apply(*call)
        found |= dict.fromkeys(self._states(), self._published())
        assert self._seen(self._top) == dict(read_tree(self._root)), "some calls were not recorded"
        return found

    def _parsed(self) -> Iterator[tuple[str, int, int, bytes, str, str]]:
        start = 0
        while start < len(self.calls):
            end = self.calls.index(b"\n", start)
            call, file, at, size, path, second = self.calls[start:end].decode().split("\t")
            start = end + 1 + int(size)
            yield call, int(file), int(at), self.calls[end + 1 : start], path, second

    def _published(self) -> str:
        return "".join(applied(mark.flushed, mark.pending).decode() for mark in self._marks)

    def _find(self, path: str) -> tuple[Node, str]:
        """Return the folder of a path, and the name in it."""
        *folders, name = Path(path).relative_to(self._root).parts
        node = self._top
        for folder in folders:
            node = node.now[folder]
        return node, name

    def _change(self, *entries: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in entries:
            folder.now.pop(name, None)
            if node is not None:
                folder.now[name], node.place = node, (folder, name)
        self._pending.append({(folder.number, name): node for folder, name, node in entries})

    def _apply(self, call: str, file: int, at: int, data: bytes, path: str, second: str) -> None:
        if call in ("write", "truncate", "fsync"):
            node = self._by_file[file]
            self._note_rename(node, path)
            if call != "fsync":
                node.pending.append(Write(at, data if call == "write" else None))
            elif node.is_folder:
                self._flush_entries(node)
            else:
                node.flushed, node.pending = applied(node.flushed, node.pending), []
            return
        folder, name = self._find(path)
        existing = folder.now.get(name)
        if call == "unlink":
            self._change((folder, name, None))
        elif call == "link":
            self._change((*self._find(second), existing))
        elif call == "rename":
            self._change((folder, name, None), (*self._find(second), existing))
        elif existing is None:
            node = Node(next(self._numbers), second if call == "symlink" else None, call == "mkdir")
            self._by_file[file] = node
            self._marks += [node] if name == MARKS else []
            self._change((folder, name, node))
        elif call == "new" and applied(existing.flushed, existing.pending):
            existing.pending.append(Write(0, None))

    def _note_rename(self, node: Node, path: str) -> None:
        """Note a rename that was not recorded: safetensors calls the system without the C library."""
        if node is not self._top and not path.endswith(" (deleted)"):
            folder, name = self._find(path)
            if folder.now.get(name) is not node:
                self._change((*node.place, None), (folder, name, node))

    def _flush_entries(self, folder: Node) -> None:
        of_folder = {
            n for n, change in enumerate(self._pending) if any(f == folder.number for f, _ in change)
        }
        flushed = self._closed(of_folder)
        for number in sorted(flushed):
            self._entries |= self._pending[number]
        self._pending = [change for n, change in enumerate(self._pending) if n not in flushed]

    def _closed(self, chosen: Iterable[int]) -> frozenset[int]:
        """Add to these pending changes the earlier ones of the same entries."""
        entries, found = set[Entry](), set(chosen)
        for number in reversed(range(len(self._pending))):
            if number in found or entries & self._pending[number].keys():
                found.add(number)
                entries |= self._pending[number].keys()
        return frozenset(found)

    def _subsets(self) -> set[frozenset[int]]:
        """Return which pending changes are on the disk: all choices of a few, some of many."""
        count, limit = len(self._pending), 256 if self._wide else 16
        if 2**count <= limit:
            chosen: list[Sequence[int]] = [
                each for size in range(count + 1) for each in itertools.combinations(range(count), size)
            ]
        else:
            numbers = list(range(count))
            chosen = [numbers[:end] for end in range(count + 1)] + [[number] for number in numbers]
            chosen += [numbers[:number] + numbers[number + 1 :] for number in numbers]
            chosen += [self._random.sample(numbers, self._random.randrange(count)) for _ in range(limit)]
        return set(map(self._closed, chosen))

    def _states(self) -> Iterator[Tree]:
        variants: dict[int, list[bytes]] = {}  # of each file
        for chosen in self._subsets():
            entries = dict(self._entries)
            for number in sorted(chosen):
                entries |= self._pending[number]
            by_folder: dict[int, list[tuple[str, Node]]] = {}
            for (folder, name), node in entries.items():
                if node is not None:
                    by_folder.setdefault(folder, []).append((name, node))
            visible = dict(_visible(by_folder, self._top.number, ""))
            files = {node.number: node for node in visible.values() if not node.is_folder and not node.target}
            for node in files.values():
                if node.number not in variants:
                    variants[node.number] = node.contents()
            several = [number for number in files if len(variants[number]) > 1]
            for choice in self._choices(several, variants):
                self.enumerated += 1
                yield read(
                    {
                        name: variants[node.number][choice.get(node.number, -1)]
                        if node.number in files
                        else node.target
                        for name, node in visible.items()
                    }
                )

    def _choices(self, several: list[int], variants: dict[int, list[bytes]]) -> Iterator[dict[int, int]]:
        """Yield choices of contents: any of one file, while all or nothing is written of the others."""
        for others in (-1, 0):
            yield dict.fromkeys(several, others)
            for number in several:
                for variant in range(len(variants[number])):
                    yield dict.fromkeys(several, others) | {number: variant}
        if self._wide and len(several) > 1:
            for _ in range(20):
                yield {number: self._random.randrange(len(variants[number])) for number in several}

    def _seen(self, folder: Node, above: str = "") -> dict[str, Content]:
        """Return what the program sees."""
        found: dict[str, Content] = {}
        for name, node in folder.now.items():
            found[above + name] = node.target or (None if node.is_folder else node.contents()[-1])
            found |= self._seen(node, f"{above}{name}/")
        return dict(read(found))


def _visible(
    by_folder: dict[int, list[tuple[str, Node]]], folder: int, above: str
) -> Iterator[tuple[str, Node]]:
    for name, node in by_folder.get(folder, ()):
        yield above + name, node
        if node.is_folder:
            yield from _visible(by_folder, node.number, f"{above}{name}/")
