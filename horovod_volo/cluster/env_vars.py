"""The environment variables that Horovod, NCCL, MPI and the thread libraries read, each with its reason.

A variable that is set already is not changed: the user, the site or the launcher chose it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from horovod_volo.cluster.binding import Binding


@dataclass(frozen=True)
class HorovodOptions:
    """Optional features of Horovod; empty or false means off."""

    autotune: str = ""  # file of the autotuner's log
    timeline: str = ""  # file of the timeline
    elastic: bool = False


@dataclass(frozen=True)
class EnvVar:
    """One row of the table; an empty value leaves the variable alone."""

    name: str
    reason: str
    value: Callable[[Binding, HorovodOptions], str]


ENV_VARS = (
    EnvVar(
        "OMP_NUM_THREADS",
        "threads of PyTorch: those of this rank. By default each rank starts one for every core of the host.",
        lambda binding, _: str(binding.threads),
    ),
    EnvVar(
        "MKL_NUM_THREADS",
        "the same for MKL, which has its own variable.",
        lambda binding, _: str(binding.threads),
    ),
    EnvVar(
        "OMP_WAIT_POLICY",
        "OpenMP threads sleep while they wait for each other. By default they spin; on a core that another "
        "process needs too, each wait then lasts until the scheduler preempts the thread.",
        lambda *_: "PASSIVE",
    ),
    EnvVar(
        "OPENBLAS_NUM_THREADS",
        "NumPy only draws random numbers and sorts here; its pool of BLAS threads would be idle.",
        lambda *_: "1",
    ),
    EnvVar(
        "CUDA_DEVICE_ORDER",
        "CUDA's default order is fastest first. By PCI address, its GPU 3 is the driver's GPU 3 on any host.",
        lambda binding, _: "PCI_BUS_ID" if binding.gpu else "",
    ),
    EnvVar(
        "NCCL_IB_HCA",
        "the NICs next to this host's GPUs, without those for storage. All ranks of a host have the same "
        "list: NCCL picks the nearest NIC for each GPU itself, and builds wrong rings where lists differ.",
        lambda binding, _: "=" + ",".join(map(str, binding.nics)) if binding.gpu and binding.nics else "",
    ),
    EnvVar(
        "UCX_NET_DEVICES",
        "MPI over UCX: only the NIC of this rank. UCX would spread each rank over several.",
        lambda binding, _: str(binding.nic or ""),
    ),
    EnvVar(
        "HOROVOD_GLOO_IFACE",
        "the interface of this rank's NIC for gloo, unless horovodrun --network-interface chose one.",
        lambda binding, _: binding.nic.interface if binding.nic else "",
    ),
    EnvVar(
        "HOROVOD_THREAD_AFFINITY",
        "Horovod's background thread on the last CPU of each rank, because the training loop tends to run on "
        "the first. Not set where a rank has too few CPUs to spare one.",
        lambda binding, _: ",".join(map(str, binding.background_cpus)),
    ),
    EnvVar(
        "HOROVOD_CYCLE_TIME",
        "milliseconds between Horovod's negotiation cycles. For a rank that computes on one core, cycles "
        "take a tenth of that core with Horovod's default of 1, and a twentieth with 10; a step then waits "
        "some 6 ms more. A rank with a GPU has spare cores and keeps the default, and so do elastic ranks: "
        "Horovod crashes when it is initialized again with this and a fusion threshold.",
        lambda binding, options: "" if binding.gpu or options.autotune or options.elastic else "10",
    ),
    EnvVar(
        "HOROVOD_FUSION_THRESHOLD",
        "no tensor fusion: buckets are reduced in place. Horovod would copy those that happen to be ready "
        "together into one buffer, and more than two ranks would round differently from run to run.",
        lambda _, options: "" if options.autotune else "0",
    ),
    EnvVar(
        "OMPI_MCA_mpi_yield_when_idle",
        "Open MPI waits by spinning, and Horovod's thread waits for the slowest rank in every cycle: with "
        "5 ms between cycles it used 85 % as much CPU time as the computing thread, and 4 % with yielding.",
        lambda *_: "1",
    ),
    EnvVar(
        "HOROVOD_AUTOTUNE",
        "--horovod-autotune: Horovod tries fusion thresholds and cycle times during training.",
        lambda _, options: "1" if options.autotune else "",
    ),
    EnvVar(
        "HOROVOD_AUTOTUNE_LOG",
        "the file in which --horovod-autotune logs its trials.",
        lambda _, options: options.autotune,
    ),
    EnvVar(
        "HOROVOD_TIMELINE",
        "--horovod-timeline: the phases of each collective, for Chrome's trace viewer.",
        lambda _, options: options.timeline,
    ),
)


def launch_env_vars(binding: Binding, options: HorovodOptions) -> dict[str, str]:
    """Return the environment variables of a rank."""
    values = {variable.name: variable.value(binding, options) for variable in ENV_VARS}
    return {name: value for name, value in values.items() if value}
