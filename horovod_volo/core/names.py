"""Names that settings take: registries of built-in entries and those of plugins, and misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Generic, TypeVar

from horovod_volo.core.errors import UserError

Entry = TypeVar("Entry")


class Registry(dict[str, Entry], Generic[Entry]):
    """The entries that a flag takes by their names."""

    def __init__(self, kind: str, flag: str) -> None:
        """Take what an entry is and the flag, for messages."""
        super().__init__()
        self.kind, self.flag = kind, flag

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry under an unused name, or raise UserError."""
        if name in self:
            raise UserError(f"The {self.kind} {name!r} exists already. Register yours under another name.")
        self[name] = entry

    def find(self, name: str) -> Entry:
        """Return the entry of a name, or raise UserError."""
        if name not in self:
            raise UserError(
                f"There is no {self.kind} {name!r}.{nearest(name, self)} {self.flag} takes "
                f"{', '.join(self)}; one of your own needs --plugin."
            )
        return self[name]


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?", or an empty string if no known name is similar."""
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]}?" if match else ""
