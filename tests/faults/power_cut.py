"""The disk states that a power cut may leave of what a program writes.

A program runs with the shim, and `Disk` replays its calls. A cut may come after any call. Of what is not
flushed by then anything may be on the disk, in any order, as in ALICE (Pillai et al., OSDI 2014): a write, a
part of it, a file's new size without its content, and a change of a folder's entries without earlier ones. A
rename is atomic, but does not flush the content of its file. Only an fsync of its folder flushes an entry.
Changes of one entry keep their order.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHIM = Path(__file__).with_name("disk_calls.c")
MARKS = "log.txt"  # a program's own log: it says what has been published
UNREAD = (MARKS, "events.out.")  # no reader needs these files

Content = bytes | str | None  # of a file, the target of a link, or a folder
Tree = frozenset[tuple[str, Content]]  # by path
Write = tuple[int, bytes | None]  # what is written at an offset; None: the file ends there


@dataclass(eq=False)
class Node:
    """A file, a link or a folder."""

    flushed: Content = b""
    pending: list[Write] = field(default_factory=list)

    def contents(self) -> list[Content]:
        """Return what may be on the disk of it: first what is flushed, last all that was written."""
        writes, count = self.pending, len(self.pending)
        if not writes:
            return [self.flushed]
        kept = []
        for end in (each for each in range(count) if each < 2 or each >= count - 2):
            (at, data), before = writes[end], writes[:end]
            kept += [before, before + writes[end + 1 :], [*before, (at, data and data[: len(data) // 2])]]
        whole = applied(self.flushed, writes)
        found = [*(applied(self.flushed, each) for each in kept), self.flushed[: len(whole)]]
        found[-1] = found[-1].ljust(len(whole), b"\0")
        return [*dict.fromkeys(each for each in found if each != whole), whole]


Entries = dict[tuple[Node, str], Node | None]  # by folder and name; None: there is none any more


def applied(content: bytes, writes: Iterable[Write]) -> bytes:
    """Return the content of a file after these writes."""
    for at, data in writes:
        content = content[:at].ljust(at, b"\0") + (b"" if data is None else data + content[at + len(data) :])
    return content


def shim(folder: Path) -> Path:
    """Compile the library that records the calls of the program that it is preloaded into."""
    library = folder / "disk_calls.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, SHIM], check=True)
    return library


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
        self._top = Node(None)
        self._by_file = {root.stat().st_ino: self._top}
        self._flushed, self._now = Entries(), Entries()  # on the disk, and as the program sees them
        self._pending: list[Entries] = []  # changes of entries that are not flushed

    def states(self) -> dict[Tree, str]:
        """Return the different states, each with all that was published by the last cut that may leave it."""
        found: dict[Tree, str] = {}
        for call in [*self._calls(), ("end", 0, 0, b"", "", "")]:
            if call[0] in ("fsync", "end"):  # until then, the possible states only become more
                seen = {name: node.contents()[-1] for name, node in visible(self._now, self._top)}
                marks = [content for name, content in seen.items() if name.rpartition("/")[2] == MARKS]
                found |= dict.fromkeys(self._states(), b"".join(marks).decode())
            self._apply(*call)
        assert tree(seen.items()) == read_tree(self._root), "some calls were not recorded"
        return found

    def _calls(self) -> Iterator[tuple[str, int, int, bytes, str, str]]:
        with Path(f"{self._root}.calls").open("rb") as calls:
            for line in calls:
                call, file, at, size, path, second = line.decode().rstrip("\n").split("\t")
                yield call, int(file), int(at), calls.read(int(size)), path, second

    def _entry(self, path: str) -> tuple[Node, str]:
        """Return the folder of a path, and the name in it."""
        folder, parts = self._top, Path(path).relative_to(self._root).parts
        for part in parts[:-1]:
            folder = self._now[folder, part] or self._top
        return folder, parts[-1]

    def _apply(self, call: str, file: int, at: int, data: bytes, path: str, second: str) -> None:
        node, change = self._by_file.get(file), Entries()
        if call in ("write", "truncate", "fsync"):
            if node is not self._top and not path.endswith(" (deleted)"):
                entry = self._entry(path)
                if self._now.get(entry) is not node:  # safetensors has renamed it without the C library
                    change = {each: None for each, found in self._now.items() if found is node} | {
                        entry: node
                    }
            if call != "fsync":
                node.pending.append((at, data if call == "write" else None))
            elif node.flushed is None:
                own = (n for n, change in enumerate(self._pending) if any(node is each for each, _ in change))
                flushed = self._closed(sum(1 << n for n in own))
                self._flushed = self._after(flushed)
                self._pending = [each for n, each in enumerate(self._pending) if not flushed >> n & 1]
            else:
                node.flushed, node.pending = node.contents()[-1], []
        elif call != "end":
            entry = self._entry(path)
            existing = self._now.get(entry)
            if call in ("unlink", "rename"):
                change[entry] = None
            if call in ("link", "rename"):
                change[self._entry(second)] = existing
            elif existing is None:
                node = self._by_file[file] = Node({"mkdir": None, "symlink": second}.get(call, b""))
                change[entry] = node
            elif call == "new":
                existing.pending.append((0, None))
        self._now |= change
        self._pending += [change] if change else []

    def _closed(self, chosen: int) -> int:
        """Add to these pending changes, a bit each, the earlier ones of the same entries."""
        entries = set[tuple[Node, str]]()
        for number, change in reversed([*enumerate(self._pending)]):
            if chosen >> number & 1 or entries & change.keys():
                chosen |= 1 << number
                entries |= change.keys()
        return chosen

    def _after(self, chosen: int) -> Entries:
        entries = dict(self._flushed)
        for number, change in enumerate(self._pending):
            entries |= change if chosen >> number & 1 else {}
        return entries

    def _chosen(self) -> set[int]:
        """Return which pending changes are on the disk: all choices of a few, some of many."""
        count = len(self._pending)
        some = range(1 << count)
        if len(some) > self._most:
            each, every = [1 << number for number in range(count)], (1 << count) - 1
            some = [0, every, *each, *(every ^ one for one in each), *(one - 1 for one in each)]
            some += [self._random.getrandbits(count) for _ in range(self._most)]
        return {*map(self._closed, some)}

    def _states(self) -> Iterator[Tree]:
        """Yield states with any content of one file, while all or nothing is written of the others."""
        contents: dict[Node, list[Content]] = {}
        for chosen in self._chosen():
            found = dict(visible(self._after(chosen), self._top))
            for node in found.values():
                contents[node] = contents.get(node) or node.contents()
            several = dict.fromkeys(node for node in found.values() if len(contents[node]) > 1)
            choices = [
                dict.fromkeys(several, others) | {node: variant}
                for others in (0, -1)
                for node in several
                for variant in range(len(contents[node]))
            ]
            for variants in choices or [{}]:
                self.enumerated += 1
                yield tree((name, contents[node][variants.get(node, -1)]) for name, node in found.items())


def visible(entries: Entries, folder: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the paths below a folder, with what is there."""
    for (parent, name), node in entries.items():
        if parent is folder and node is not None:
            yield prefix + name, node
            if node.flushed is None:
                yield from visible(entries, node, f"{prefix}{name}/")
