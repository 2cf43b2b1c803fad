"""Binds this process to the CPUs of its rank, and sets the environment variables of libraries.

Call this before any library starts threads or initializes CUDA: threads inherit the CPUs of the
thread that starts them. If the operating system refuses a binding, that is only a warning.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from horovod_volo.cluster import topology
from horovod_volo.cluster.binding import Binding, LaunchedRank, plan_binding
from horovod_volo.cluster.launch_env import read_launch_env

# Names of the processes that start ranks.
_LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "slurmstepd"}


def bind(mode: str, *, ranks_change: bool = False) -> Binding:
    """Bind this process and set the variables that its libraries read; return the binding in effect.

    A variable that is set already is not changed: the user, the site or the launcher chose it.
    """
    binding = plan_own_binding(mode)
    is_alone = read_launch_env().size == 1
    variables = launch_env_vars(binding, is_alone, autotunes=autotunes(), ranks_change=ranks_change)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    warnings = [*binding.warnings]
    if (threads := compute_threads(binding.threads)) != binding.threads:
        warnings.append(
            f"OMP_NUM_THREADS is set: torch computes with {threads}, not {binding.threads} threads"
        )
    return replace(binding, warnings=(*warnings, *_apply(binding)))


def autotunes() -> bool:
    """Return whether Horovod is to tune itself."""
    return os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0")


def compute_threads(default: int) -> int:
    """Return the number of threads that torch computes with: OMP_NUM_THREADS, or else `default`."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2": nested parallelism
    return int(outermost) if outermost.isdecimal() and int(outermost) > 0 else default


def plan_own_binding(mode: str = "none") -> Binding:
    """Return the binding of this rank; change nothing."""
    launch, driver_gpus = read_launch_env(), topology.list_gpus()
    host = topology.read_host(driver_gpus=driver_gpus)
    rank = LaunchedRank(
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        ranks_bound_here=ranks_bound_by_launcher(launch.local_size, os.environ),
        visible_gpus=visible_gpus(host, driver_gpus, os.environ.get("CUDA_VISIBLE_DEVICES")),
    )
    return plan_binding(host, rank, mode)


def visible_gpus(
    host: topology.Host, driver_gpus: Sequence[tuple[str, str]], setting: str | None
) -> tuple[int, ...] | None:
    """Return the indices of the host's GPUs that CUDA shows to this process; None: all.

    `setting` is CUDA_VISIBLE_DEVICES, or None if it is not set.
    """
    # A MIG device is a part of a GPU, nobody can say of which: then all GPUs count as visible.
    shown = driver_gpus if setting is None or "MIG-" in setting else [*_selected(driver_gpus, setting)]
    if shown is driver_gpus and len(driver_gpus) == len(host.gpus):
        return None
    names = [gpu.name for gpu in host.gpus]
    return tuple(names.index(topology.kernel_address(address)) for address, _ in shown)


def count_gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process; of MIG devices, it shows one."""
    setting, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), topology.list_gpus()
    if setting is None:
        return len(gpus)
    return 1 if "MIG-" in setting else sum(1 for _ in _selected(gpus, setting))


def _selected(driver_gpus: Sequence[tuple[str, str]], setting: str) -> Iterator[tuple[str, str]]:
    """Yield the GPUs that CUDA_VISIBLE_DEVICES selects, by index or UUID, in its order."""
    for name in filter(None, map(str.strip, setting.split(","))):
        if name.isdecimal():
            matching = driver_gpus[int(name) : int(name) + 1]
        else:
            matching = [gpu for gpu in driver_gpus if gpu[1].startswith(name)]
        if len(matching) != 1:
            return  # CUDA ignores the rest of the list from the first invalid name on
        yield matching[0]


def ranks_bound_by_launcher(
    local_size: int, environment: Mapping[str, str], proc: Path = Path("/proc")
) -> int:
    """Return how many ranks the launcher bound to this process's CPUs; 0: it did not bind.

    The count is 1 where each rank has a core or a slice of the host, and more where ranks share a socket.
    """
    process = _status(proc / "self")
    own = len(topology.cpu_list(process.get("Cpus_allowed_list", "")))
    while process := _status(proc / process.get("PPid", "0")):
        if process["Name"].partition(".")[0] in _LAUNCHERS:
            of_launcher = len(topology.cpu_list(process["Cpus_allowed_list"]))
            # slurmstepd itself is not confined to the CPUs of its job.
            of_launcher = min(of_launcher, int(environment.get("SLURM_CPUS_ON_NODE", of_launcher)))
            return math.ceil(local_size * own / of_launcher) if own < of_launcher else 0
    return 0


def _status(process: Path) -> dict[str, str]:
    """Return the fields of a process's status; nothing if there is no such process."""
    lines = topology.read_text_or_empty(process / "status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _apply(binding: Binding) -> list[str]:
    """Set the CPU affinity; return what the system refused."""
    if binding.mode == "none":
        return []
    problems = []
    for thread in Path("/proc/self/task").iterdir():  # one, unless a library was imported before
        try:
            os.sched_setaffinity(int(thread.name), binding.cpus)
        except ProcessLookupError:
            continue  # the thread has ended
        except OSError as error:
            problems.append(f"cannot bind to CPUs {topology.cpu_ranges(binding.cpus)}: {error.strerror}")
    return list(dict.fromkeys(problems))  # each once


def launch_env_vars(
    binding: Binding, is_alone: bool = False, *, autotunes: bool = False, ranks_change: bool = False
) -> dict[str, str]:
    """Return the variables of a rank that Horovod, NCCL, MPI and the thread libraries read."""
    variables = {
        # Threads of PyTorch: those of this rank. By default each rank starts one for every core of the host.
        "OMP_NUM_THREADS": str(binding.threads),
        "MKL_NUM_THREADS": str(binding.threads),  # MKL has its own variable
        # By default OpenMP threads spin while they wait for each other. A lone rank trains small networks 1.5
        # times as fast that way; on a core that others need too, each wait lasts until it is preempted.
        "OMP_WAIT_POLICY": "" if is_alone and not (binding.gpu or ranks_change) else "PASSIVE",
        # NumPy only draws random numbers and sorts here; its pool of BLAS threads would be idle.
        "OPENBLAS_NUM_THREADS": "1",
        # CUDA's default order is fastest first. By PCI address, its GPU 3 is the driver's GPU 3 on any host.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID" if binding.gpu else "",
        # The NICs next to this host's GPUs, without those for storage. All ranks of a host have the same
        # list: NCCL picks the nearest NIC for each GPU itself, and builds wrong rings where lists differ.
        "NCCL_IB_HCA": "=" + ",".join(map(str, binding.nics)) if binding.gpu and binding.nics else "",
        # MPI over UCX: only the NIC of this rank. UCX would spread each rank over several.
        "UCX_NET_DEVICES": str(binding.nic or ""),
        # The interface of this rank's NIC for gloo, unless horovodrun --network-interface chose one.
        "HOROVOD_GLOO_IFACE": binding.nic.interface if binding.nic else "",
        # Milliseconds between Horovod's negotiation cycles. For a rank that computes on one core, cycles take
        # a tenth of that core with Horovod's default of 1, and a twentieth with 10; a step then waits some
        # 6 ms more. A rank with a GPU has spare cores and keeps the default, and so do ranks that may change:
        # Horovod crashes when it is initialized again with this and a fusion threshold.
        "HOROVOD_CYCLE_TIME": "" if binding.gpu or autotunes or ranks_change else "10",
        # No tensor fusion: buckets are reduced in place. Horovod would copy those that happen to be ready
        # together into one buffer, and more than two ranks would round differently from run to run.
        "HOROVOD_FUSION_THRESHOLD": "" if autotunes else "0",
        # Open MPI waits by spinning, and Horovod's thread waits for the slowest rank in every cycle: with
        # 5 ms between cycles it used 85 % as much CPU time as the computing thread, and 4 % with yielding.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return {name: value for name, value in variables.items() if value}
