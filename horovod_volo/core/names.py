"""Names that settings take: registries of built-in entries, of extras and of plugins, and misspelt names.

An extra is a folder of this package that only some runs need. The core does not import it: EXTRAS says which
of its modules to import when a setting has that name, and the module then registers what it brings, as a
plugin does. Without its folder, the name is refused, and all else works. So do rarer models and optimizers
of the core itself: a run imports those that it uses.
"""

import difflib
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

from horovod_volo.core.errors import UserError

Entry = TypeVar("Entry")

# By the kind of a registry and the name of an entry.
EXTRAS: dict[str, dict[str, str]] = {
    "task": {"segmentation": "horovod_volo.dense.segmentation", "detection": "horovod_volo.dense.detection"},
    "evaluation": {
        "classification": "horovod_volo.evaluation.accuracy",
        **dict.fromkeys(("segmentation", "detection"), "horovod_volo.dense.trained"),
    },
    "export": dict.fromkeys(("segmentation", "detection"), "horovod_volo.dense.trained"),
    "kind of data to pack": {"images with masks": "horovod_volo.dense.scene_shards"},
    "image decoder": {"pillow": "horovod_volo.data.pillow_pipeline"},
    "format of images": {
        "tar": "horovod_volo.data.images.tar_shards",
        **dict.fromkeys(("tfrecord", "recordio"), "horovod_volo.data.packing.records"),
    },
    "format of label maps": {"published": "horovod_volo.token_labels.published_maps"},
    "choice of kernels": {"auto": "horovod_volo.kernels.choice"},
    "operator of CPUs": {"outlook attention": "horovod_volo.kernels.outlook_gather"},
    "model": dict.fromkeys(("lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l"), "horovod_volo.models.lvvit"),
    "batch norm over ranks": {"all": "horovod_volo.models.sync_batch_norm"},
    "optimizer": {
        "muon": "horovod_volo.optim.muon",
        "lamb": "horovod_volo.optim.trust_ratio",
        "lars": "horovod_volo.optim.trust_ratio",
    },
    "exchange of gradients": {
        "sharded": "horovod_volo.cluster.sharding",
        **dict.fromkeys(("whole reproducible", "sharded reproducible"), "horovod_volo.cluster.reproducible"),
    },
    "pictures": {"classification": "horovod_volo.pictures.classification"},
    "profiler": {"steps": "horovod_volo.profiler.step_profiler"},
    "address": dict.fromkeys(("http", "https", "s3", "gs", "az"), "horovod_volo.remote.remote_catalog"),
    "callback of every run": {"ledger": "horovod_volo.elastic.ledger"},
    "way to start ranks": {"elastic": "horovod_volo.elastic.run"},
}


class Registry(dict[str, Entry], Generic[Entry]):
    """The entries that a flag takes by their names."""

    def __init__(self, kind: str, flag: str) -> None:
        """Take what an entry is and the flag, for messages."""
        super().__init__()
        self.kind, self.flag = kind, flag

    def has_extra(self, name: str) -> bool:
        """Return whether an extra of this installation brings the entry."""
        module = EXTRAS.get(self.kind, {}).get(name)
        return module is not None and find_spec(module.rpartition(".")[0]) is not None

    def names(self) -> list[str]:
        """Return the names of all entries, also of those that are not imported yet."""
        return list(dict.fromkeys([*self, *EXTRAS.get(self.kind, {})]))

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry under an unused name, or raise UserError."""
        module = EXTRAS.get(self.kind, {}).get(name)
        if name in self or (module is not None and module not in sys.modules):
            raise UserError(f"The {self.kind} {name!r} exists already. Register yours under another name.")
        self[name] = entry

    def find(self, name: str) -> Entry:
        """Return the entry of a name, or raise UserError."""
        module = EXTRAS.get(self.kind, {}).get(name)
        if name not in self and module is not None:
            if not self.has_extra(name):
                folder = module.rpartition(".")[0].replace(".", "/")
                raise UserError(
                    f"{self.flag} {name} needs {folder}, which is not installed. Install it whole."
                )
            import_module(module)  # registers the entry
        if name not in self:
            raise UserError(
                f"There is no {self.kind} {name!r}.{nearest(name, self.names())} {self.flag} takes "
                f"{', '.join(self.names())}; one of your own needs --plugin."
            )
        return self[name]


def nearest(wrong: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " Did you mean X?", or an empty string if no known name is similar."""
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]}?" if match else ""
