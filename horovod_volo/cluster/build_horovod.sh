#!/usr/bin/env bash
# Builds a Horovod wheel for the PyTorch of $PYTHON and prints the wheel's path. A wheel built before is
# reused.
#
#   python -m pip install "$(horovod-volo build_horovod)"     from an installed package
#   python -m pip install "$(./tools/build_horovod)"          in a checkout
#
# Horovod is published as source only, and its last release requests C++14 where PyTorch needs C++17.
# NCCL is built in if there is an NVIDIA GPU, or with HOROVOD_GPU_OPERATIONS=NCCL (on a login node without
# one). HOROVOD_WITHOUT_MPI=1 leaves MPI out. No flag depends on this machine's processor, so a wheel in a
# shared home directory runs on every node with the same system.
set -euo pipefail
python=${PYTHON:-python3}
cxx_standard=17
version=0.28.1
cache=${HOROVOD_VOLO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod_volo}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# --- versions and build flags -------------------------------------------------------------------

read -r tag torch torch_cuda < <("$python" -c '
import sys, torch
print(sys.implementation.cache_tag, torch.__version__, torch.version.cuda or "none")') \
    || fail "No PyTorch in $python. Install it there, or set PYTHON to the interpreter that has it."

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
mpi=none
if [ "${HOROVOD_WITHOUT_MPI:-0}" != 1 ]; then
    export HOROVOD_WITH_MPI=1
    mpi=$(mpirun --version 2>/dev/null | sed -n '1s/^[^0-9]*\([0-9]*\)\..*/\1/p' || true)
    [ -n "$mpi" ] || fail "No mpirun found. Install Open MPI, or set HOROVOD_WITHOUT_MPI=1 to build without MPI."
fi

# If this is empty, Horovod uses the flags of this machine's processor.
case $(uname -m) in
    x86_64) # in every x86 server since 2013
        export HOROVOD_BUILD_ARCH_FLAGS="-mf16c -mavx -mfma"
        gloo_flags=-DGLOO_USE_AVX=1
        ;;
    *) # the compiler's own baseline
        export HOROVOD_BUILD_ARCH_FLAGS="-O3"
        gloo_flags=
        ;;
esac

if nvidia-smi -L >/dev/null 2>&1; then
    export HOROVOD_GPU_OPERATIONS=${HOROVOD_GPU_OPERATIONS:-NCCL}
    gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d '. ' | sort -un | paste -sd,)
fi
nccl=none
if [ -n "${HOROVOD_GPU_OPERATIONS:-}" ]; then
    [ "$torch_cuda" != none ] || fail "PyTorch $torch is a CPU build and cannot drive the GPU." \
        "Install the CUDA build, and run this again."
    # Ask the compiler for its folder: nvcc on PATH may be a link or a script.
    nvcc_folder=$(nvcc --dryrun -x cu -E /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p' || true)
    cuda_home=${nvcc_folder%/bin}
    export CUDA_HOME=${CUDA_HOME:-${cuda_home:-/usr/local/cuda}}
    [ -x "$CUDA_HOME/bin/nvcc" ] || fail "No CUDA compiler at $CUDA_HOME/bin/nvcc." \
        "Load the module or install the toolkit of CUDA $torch_cuda, or set CUDA_HOME to its folder."
    export HOROVOD_CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-${gpus:-80,90}}
    # A process uses one libnccl.so.2, the first one loaded: PyTorch's. Compile with the headers of that one.
    nccl=$("$python" -c '
import pathlib, sys
print(next(header.parents[1] for path in sys.path for header in pathlib.Path(path).glob("nvidia/nccl/include/nccl.h")))' 2>/dev/null) \
        || fail "PyTorch's NCCL (pip package nvidia-nccl-cu..) is not in $python. Install PyTorch with its dependencies."
fi

for program in g++ make cmake; do
    command -v "$program" >/dev/null || fail "No $program found, which builds Horovod. Install it, or load its module."
done

flags="sleeping $cxx_standard $HOROVOD_BUILD_ARCH_FLAGS $gloo_flags ${HOROVOD_GPU_OPERATIONS:-} ${HOROVOD_BUILD_CUDA_CC_LIST:-}"
system="$(uname -m) $(getconf GNU_LIBC_VERSION)"
key=horovod-${version}_torch-${torch}_${tag}_mpi-${mpi}_$(printf '%s' "$flags $system" | sha256sum | cut -c1-8)
wheel_folder=$cache/$key

# --- reuse the wheel, or build it ---------------------------------------------------------------

mkdir -p "$wheel_folder"
wheel_folder=$(cd "$wheel_folder" && pwd)
exec 9>"$wheel_folder/lock"
flock -n 9 || {
    echo "Waiting for another build of the same wheel" >&2
    flock 9
}
if compgen -G "$wheel_folder/*.whl"; then
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    # Horovod imports these while it is built and tested; its setup.py does not list them.
    "$python" -m pip install "setuptools>=68,<80" wheel packaging cffi cloudpickle psutil pyyaml
    "$python" -m pip download --no-deps --no-build-isolation --no-binary horovod -d "$work" "horovod==$version"
    tar -xf "$work/horovod-$version.tar.gz" -C "$work"
    source=$work/horovod-$version

    for file in "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"; do
        sed -i "s/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD $cxx_standard)/" "$file"
        grep -q "set(CMAKE_CXX_STANDARD $cxx_standard)" "$file" || fail "$file does not set C++ 14, so it could not be raised."
    done
    # GCC 14 rejects an assignment to a constant, in code that is never called.
    sed -i 's/^  const size_type count_;/  size_type count_;/' "$source/third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    # gloo sums fp16 one element at a time: its vectorised code is in math.cc, which no build option compiles.
    sed -i '0,/^list(APPEND GLOO_SRCS/s//&\n  math.cc/' "$source/third_party/gloo/gloo/CMakeLists.txt"
    # The same for the CUDA kernels: the C++ library of CUDA 13 does not support C++11.
    sed -i "s/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD $cxx_standard)/" \
        "$source/horovod/common/ops/cuda/CMakeLists.txt"

    # In this all-reduce, with which each cycle begins, ranks wait for the slowest one. Open MPI waits in a loop, and
    # Linux 6.18 was seen to run such ranks and nothing else for half a minute: so sleep between two looks.
    controller=$source/horovod/common/mpi/mpi_controller.cc
    sed -i 's/MPI_Allreduce(MPI_IN_PLACE, bitvector/allreduce_asleep(bitvector/' "$controller"
    [ "$(grep -c 'allreduce_asleep(' "$controller")" = 2 ] || fail "$controller has other calls of MPI_Allreduce."
    sed -i "/^namespace common {/r /dev/stdin" "$controller" <<'CODE'
static int allreduce_asleep(void* values, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  MPI_Request request;
  int done = 0, error = MPI_Iallreduce(MPI_IN_PLACE, values, count, type, op, comm, &request);
  for (int looks = 0; error == MPI_SUCCESS && !done; ++looks) {
    if (looks > 20) std::this_thread::sleep_for(std::chrono::microseconds(50));
    error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
  }
  return error;
}
CODE

    if [ "$nccl" != none ]; then
        # The pip package lacks the name that the linker looks for.
        mkdir "$work/nccl"
        ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/libnccl.so"
        export HOROVOD_NCCL_HOME=$nccl HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$work/nccl
    fi

    # One compiler process needs up to 2 GB.
    by_memory=$(awk '/^MemAvailable/ {print int($2 / 2000000)}' /proc/meminfo)
    jobs=$(printf '%s\n' "$(nproc)" "$by_memory" | sort -n | head -1)
    # GCC 13 and newer no longer include these headers implicitly; CMake 4 rejects the minimum version that
    # gloo states.
    CXXFLAGS="${CXXFLAGS:-} $gloo_flags -include cstdint -include thread -include string -include stdexcept" \
        CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j$((jobs > 1 ? jobs : 1)) \
        "$python" -m pip wheel --no-deps --no-build-isolation -w "$work" "$source"

    # Import the wheel before it is published: a Horovod without a back end would fail only on the cluster.
    "$python" -m pip install --no-deps --target "$work/installed" "$work"/horovod-*.whl
    PYTHONPATH=$work/installed "$python" -c "
import horovod.torch as hvd
built = {'Gloo': hvd.gloo_built(), 'MPI': '$mpi' == 'none' or hvd.mpi_built(), 'NCCL': '$nccl' == 'none' or hvd.nccl_built()}
missing = [name for name, is_built in built.items() if not is_built]
assert not missing, f'the wheel was built without {missing}'"
} >&2

# Published by rename: another process sees the complete wheel or none.
wheel=$(basename "$work"/horovod-*.whl)
cp "$work/$wheel" "$wheel_folder/.$wheel"
mv "$wheel_folder/.$wheel" "$wheel_folder/$wheel"
printf '%s\n' "$wheel_folder/$wheel"
