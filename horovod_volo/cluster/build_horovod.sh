#!/usr/bin/env bash
# Builds a Horovod wheel for the PyTorch of $PYTHON and prints the wheel's path, or installs it. A wheel built
# before is reused. `horovod-volo build-horovod --help` explains the flags, which are the same:
#
#   build_horovod.sh [--install] [--nccl | --cpu] [--cc 80,90] [--without-mpi]
#
# Horovod is published as source only, and its last release requests C++14, which PyTorch no longer accepts.
# No flag depends on this machine's processor, so a wheel in a shared home directory runs on every node with the
# same system.
set -euo pipefail
python=${PYTHON:-python3}
export CXX=${CXX:-g++} # conda's compiler has another name, which CXX has
read -ra compiler <<<"$CXX"
version=0.28.1
newest_tried=2.15    # of PyTorch: docs/install.md, setup.cfg
changes=2            # raise it with each change of Horovod's source below, so that no earlier wheel is reused
cache=${HOROVOD_VOLO_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod_volo}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

mistake() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

# --- what to build ------------------------------------------------------------------------------

install=no gpu='' architectures='' mpi=yes
while [ $# -gt 0 ]; do
    case $1 in
        --install) install=yes ;;
        --nccl) gpu=nccl ;;
        --cpu) gpu=none ;;
        --cc)
            architectures=${2:-none}
            [ $# -eq 1 ] || shift
            ;;
        --cc=*) architectures=${1#*=} ;;
        --without-mpi) mpi=none ;;
        *) mistake "There is no flag $1." ;;
    esac
    shift
done
if [ -n "$architectures" ]; then
    [[ $architectures =~ ^[0-9]+(,[0-9]+)*$ ]] || mistake "--cc takes compute capabilities such as 80,90, not $architectures."
    [ "$gpu" != none ] || mistake "--cc is about GPUs, and --cpu builds without them: give one of the two."
    gpu=nccl
fi

read -r tag torch torch_cuda headers < <("$python" -c '
import pathlib, sys, torch
headers = pathlib.Path(torch.__file__).parent / "include"
print(sys.implementation.cache_tag, torch.__version__, torch.version.cuda or "none", headers)') \
    || fail "No PyTorch in $python. Install it there, or set PYTHON to the interpreter that has it."
if [ "$(printf '%s\n' "$newest_tried.999" "$torch" | sort -V | tail -1)" = "$torch" ]; then
    echo "PyTorch $torch is newer than $newest_tried, the newest that was tried. To try it, in a checkout:" \
        "./tools/try_torch ${torch%+*} /path/to/new_folder --cpu" >&2
fi

if [ -z "$gpu" ] && nvidia-smi -L >/dev/null 2>&1; then
    gpu=nccl
fi
case $gpu,$torch_cuda in
    nccl,none) fail "PyTorch $torch is a CPU build and cannot drive the GPU." \
        "Install the CUDA build and run this again, or build for ranks on CPUs: --cpu" ;;
    ,none) gpu=none ;;
    ,*) fail "PyTorch $torch is built for CUDA, and this machine has no GPU. Add the flag of the Horovod to build:" \
        "    --nccl --cc 80,90   for nodes with GPUs (80: A100; 90: H100, H200)" \
        "    --cpu               for ranks on CPUs only" ;;
esac

unset HOROVOD_GPU_OPERATIONS HOROVOD_WITHOUT_MPI
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
if [ "$mpi" = none ]; then
    export HOROVOD_WITHOUT_MPI=1
else
    export HOROVOD_WITH_MPI=1
    mpi=$(mpirun --version 2>/dev/null | sed -n '1s/^[^0-9]*\([0-9]*\)\..*/\1/p' || true)
    [ -n "$mpi" ] || fail "No mpirun found. Install Open MPI or load its module, or build without MPI: --without-mpi"
fi

for program in "${compiler[0]}" make cmake; do
    command -v "$program" >/dev/null || fail "No $program found, which builds Horovod. Install it, or load its module."
done

# PyTorch's headers refuse C++ standards older than they need. Nothing else says which: PyTorch compiled its own
# extensions as C++20 long before its headers refused C++17, and demanding that would refuse older compilers.
cxx_standard='' refusals=''
for standard in 17 20 23; do
    if refusal=$("${compiler[@]}" "-std=c++$standard" -E -I "$headers" -x c++ "$headers/ATen/ATen.h" 2>&1 >/dev/null); then
        cxx_standard=$standard
        break
    fi
    refusals+=$refusal$'\n'
done
[ -n "$cxx_standard" ] || fail "$(grep -m 1 error <<<"$refusals")" \
    "The compiler, $("${compiler[@]}" --version | head -1), is too old for PyTorch $torch. GCC has C++17 since version 8" \
    "and C++20 since version 11. Install a newer one or load its module, and name it: CXX=g++-12"

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

nccl=none
if [ "$gpu" = nccl ]; then
    # Ask the compiler for its folder: nvcc on PATH may be a link or a script.
    nvcc_folder=$(nvcc --dryrun -x cu -E /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p' || true)
    cuda_home=${nvcc_folder%/bin}
    export CUDA_HOME=${CUDA_HOME:-${cuda_home:-/usr/local/cuda}}
    [ -x "$CUDA_HOME/bin/nvcc" ] || fail "No CUDA compiler at $CUDA_HOME/bin/nvcc." \
        "Load the module or install the toolkit of CUDA $torch_cuda, or set CUDA_HOME to its folder."
    cuda=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    [ "${cuda%%.*}" = "${torch_cuda%%.*}" ] || fail "$CUDA_HOME/bin/nvcc is of CUDA $cuda, PyTorch $torch of CUDA" \
        "$torch_cuda. Load the module or install the toolkit of CUDA $torch_cuda, or set CUDA_HOME to its folder."
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH HOROVOD_NCCL_LINK=SHARED
    gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d '. ' | sort -un | paste -sd,) || gpus=''
    export HOROVOD_BUILD_CUDA_CC_LIST=${architectures:-${HOROVOD_BUILD_CUDA_CC_LIST:-${gpus:-80,90}}}
    # A process uses one libnccl.so.2, the first one loaded: PyTorch's. Compile with the headers of that one.
    nccl=$("$python" -c '
import pathlib, sys
print(next(header.parents[1] for path in sys.path for header in pathlib.Path(path).glob("nvidia/nccl/include/nccl.h")))' 2>/dev/null) \
        || fail "PyTorch's NCCL (pip package nvidia-nccl-cu..) is not in $python. Install PyTorch with its dependencies."
    # The README of NVIDIA's resiliency extension (NVRx) excludes these versions, because of a fault in processes that
    # leave their communicators and make new ones.
    nccl_version=$(sed -n 's/^#define NCCL_VERSION_CODE //p' "$nccl/include/nccl.h")
    if [ "$nccl_version" -ge 22803 ] && [ "$nccl_version" -le 22808 ]; then
        echo "NVIDIA advises against NCCL 2.28.${nccl_version#2280} where processes make communicators again, as elastic" \
            "runs do. For these install another one, such as nvidia-nccl-cu${torch_cuda%%.*}==2.28.9." >&2
    fi
fi

flags="$changes $cxx_standard $HOROVOD_BUILD_ARCH_FLAGS $gloo_flags ${HOROVOD_GPU_OPERATIONS:-} ${HOROVOD_BUILD_CUDA_CC_LIST:-}"
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

build_wheel() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
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
    # The CUDA kernels include nothing of PyTorch. The C++ library of CUDA 13 does not support C++11, and CMake 3.25
    # does not know how nvcc 13 compiles C++20.
    sed -i "s/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/" \
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

    # With a PyTorch for CUDA, Horovod includes CUDA wherever it finds nvcc.
    if [ "$gpu" = none ]; then
        sed -i 's/(torch.version.cuda is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
    fi
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

    # Published by rename: another process sees the complete wheel or none.
    wheel=$(basename "$work"/horovod-*.whl)
    cp "$work/$wheel" "$wheel_folder/.$wheel"
    mv "$wheel_folder/.$wheel" "$wheel_folder/$wheel"
}

if ! compgen -G "$wheel_folder/*.whl" >/dev/null; then
    build_wheel >&2
fi
wheel=$(compgen -G "$wheel_folder/*.whl")
if [ "$install" = no ]; then
    printf '%s\n' "$wheel"
else
    # pip skips a wheel whose version is installed, although that may be for another PyTorch.
    "$python" -m pip install --force-reinstall --no-deps "$wheel" >&2
    "$python" -m pip install "$wheel" >&2 # the packages that it requires
    echo "Horovod $version for PyTorch $torch is installed in $python"
fi
