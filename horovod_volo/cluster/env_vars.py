"""The variables that Horovod, NCCL, MPI and the thread libraries read: what is set, and why.

One table. A variable that is set already is left alone: the user, the site or the launcher knows better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from horovod_volo.cluster.binding import Binding


@dataclass(frozen=True)
class HorovodSwitches:
    """What the user may have Horovod do besides: file names, or empty."""

    autotune: str = ""
    timeline: str = ""


@dataclass(frozen=True)
class EnvVar:
    """One line of the table; an empty value leaves the variable alone."""

    name: str
    reason: str
    value: Callable[[Binding, HorovodSwitches], str]


TABLE = (
    EnvVar(
        "OMP_NUM_THREADS",
        "torch's threads: the rank's share. Left alone, each rank takes one for every core of the host.",
        lambda binding, _: str(binding.threads),
    ),
    EnvVar(
        "MKL_NUM_THREADS",
        "the same for MKL, which counts for itself.",
        lambda binding, _: str(binding.threads),
    ),
    EnvVar(
        "OMP_WAIT_POLICY",
        "OpenMP's threads sleep while they wait for each other. Left alone they spin, and on a core that "
        "another process needs as well each wait lasts until the system takes the core away.",
        lambda *_: "PASSIVE",
    ),
    EnvVar(
        "OPENBLAS_NUM_THREADS",
        "NumPy draws and sorts here and multiplies nothing: its pool of threads would only lie about.",
        lambda *_: "1",
    ),
    EnvVar(
        "CUDA_DEVICE_ORDER",
        "CUDA's own order is fastest first. By PCI address, GPU 3 is the driver's GPU 3 on mixed hosts too.",
        lambda binding, _: "PCI_BUS_ID" if binding.gpu else "",
    ),
    EnvVar(
        "NCCL_IB_HCA",
        "the cards next to this host's GPUs, not those for storage. The same on all ranks of a host: NCCL "
        "takes the nearest to each GPU by itself, and builds broken rings where ranks see different cards.",
        lambda binding, _: "=" + ",".join(map(str, binding.cards)) if binding.gpu and binding.cards else "",
    ),
    EnvVar(
        "UCX_NET_DEVICES",
        "MPI over UCX: this rank's card alone. UCX would spread each rank over several.",
        lambda binding, _: str(binding.card or ""),
    ),
    EnvVar(
        "HOROVOD_GLOO_IFACE",
        "gloo over this rank's card, where horovodrun has not chosen by its --network-interface.",
        lambda binding, _: binding.card.interface if binding.card else "",
    ),
    EnvVar(
        "HOROVOD_THREAD_AFFINITY",
        "Horovod's own thread on the last CPU of each rank's part, out of the way of the first, where the "
        "training loop tends to run. Not where a rank has too few to spare one.",
        lambda binding, _: ",".join(map(str, binding.service_cpus)),
    ),
    EnvVar(
        "HOROVOD_CYCLE_TIME",
        "milliseconds between Horovod's rounds of asking who has what. Rounds take from a rank that computes "
        "on one core: a tenth of it with Horovod's own choice of 1, a twentieth with 10, and a step waits "
        "some 6 ms more. With a GPU there are cores to spare: Horovod's choice stays.",
        lambda binding, switches: "" if binding.gpu or switches.autotune else "10",
    ),
    EnvVar(
        "HOROVOD_FUSION_THRESHOLD",
        "nothing is fused: buckets travel from where they lie. Horovod would copy those that meet by chance "
        "into one message, and more than two ranks would round differently from run to run.",
        lambda _, switches: "" if switches.autotune else "0",
    ),
    EnvVar(
        "OMPI_MCA_mpi_yield_when_idle",
        "Open MPI waits by spinning, and Horovod's thread waits for the slowest rank in every round: with "
        "5 ms between rounds it took 85 % as much time as the computing thread on its core, and 4 % where it "
        "yields.",
        lambda *_: "1",
    ),
    EnvVar(
        "HOROVOD_AUTOTUNE",
        "--horovod-autotune: Horovod tries fusion sizes and cycle times while it trains.",
        lambda _, switches: "1" if switches.autotune else "",
    ),
    EnvVar("HOROVOD_AUTOTUNE_LOG", "where --horovod-autotune writes what it tried.", lambda _, s: s.autotune),
    EnvVar("HOROVOD_TIMELINE", "--horovod-timeline: what each message waited for.", lambda _, s: s.timeline),
)


def launch_env_vars(binding: Binding, switches: HorovodSwitches) -> dict[str, str]:
    """Return the variables of a rank."""
    values = {variable.name: variable.value(binding, switches) for variable in TABLE}
    return {name: value for name, value in values.items() if value}
