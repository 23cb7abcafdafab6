#!/usr/bin/env bash
# Everything in core/ and isa/ on every instruction set of this processor, under the address and undefined-behaviour
# sanitizers, then under the thread sanitizer. Needs cmake and a C++20 compiler, and says so where a compiler has no
# sanitizers; no Python, no MLX.
#
#   runtime/native/tests/sanitize.sh [address|thread|plain|aarch64|python]...
#
# The default is address and thread. plain: as released; memory beyond every buffer is out of bounds there too. aarch64:
# cross-compiled and emulated (Debian: g++-aarch64-linux-gnu, qemu-user). python: the kernels' Python tests, and a minute
# of fuzzing them, on a module built for the address and undefined-behaviour sanitizers; PYTHON=... has what the package
# needs. BUILD=... names the build folder; SETS=best runs this processor's best instruction set
# only, SETS=amx-emulated or another name that one.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
build=${BUILD:-$root/build/sanitize}
export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:max_malloc_fill_size=1073741824:malloc_fill_byte=255
export TSAN_OPTIONS=halt_on_error=1

driver() {  # name, compiler flags, further cmake arguments
  cmake -S "$root" -B "$build/$1" -DHEADRACE_DRIVER=ON -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="$2" "${@:3}" >/dev/null
  cmake --build "$build/$1" --parallel "$(nproc)" >/dev/null
  echo "== $1"
}

# An inline function that an instruction set's object file shares with others could be the one that all processors get.
keep_to_themselves() {
  local isa shared
  for isa in avx512 avx2 portable; do
    shared=$(find "$1" -path "*/headrace_$isa.dir/*.o" -exec nm -C --defined-only --extern-only {} + |
      grep -vE "^$|:$| headrace::$isa::|DW.ref.__gxx_personality" || true)
    [ -z "$shared" ] || { echo "the kernels for $isa share: $shared" >&2; exit 1; }
  done
}

# The sanitizers' libraries come with the compiler, or do not.
has() {
  echo 'int main() {}' | "${CXX:-c++}" -x c++ - "-fsanitize=$1" -o /dev/null 2>/dev/null && return
  echo "== skipped: ${CXX:-c++} cannot build with -fsanitize=$1"
  return 1
}

command -v ninja >/dev/null && export CMAKE_GENERATOR=Ninja
[ $# -gt 0 ] || set -- address thread
for kind in "$@"; do
  case $kind in
    address)
      has address,undefined || continue
      driver address "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
      keep_to_themselves "$build/address"
      "$build/address/kernel_driver" ${SETS:+"$SETS"}
      ;;
    thread) # which does not follow a fork of a threaded process
      has thread || continue
      driver thread "-O0 -g1 -fsanitize=thread"
      "$build/thread/kernel_driver" no-fork ${SETS:+"$SETS"}
      ;;
    plain)
      driver plain "-O3"
      "$build/plain/kernel_driver"
      ;;
    aarch64)
      driver aarch64 "-O2" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
      qemu-aarch64 "$build/aarch64/kernel_driver" no-fork
      ;;
    python)
      python=${PYTHON:-python3}
      tree=$build/python/tree
      cmake -S "$root" -B "$build/python" -DPython_EXECUTABLE="$(command -v "$python")" -DCMAKE_BUILD_TYPE=None \
        -DHEADRACE_ALL_SETS=ON -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined" >/dev/null
      cmake --build "$build/python" --parallel "$(nproc)" --target _native >/dev/null
      mkdir -p "$tree"
      cp -R "$root"/{headrace,app,models,runtime,tests,assets,pyproject.toml} "$tree"
      cp "$build"/python/_native*.so "$tree/runtime"
      # An editable install's finder comes before every path, and would give the module that is installed.
      echo "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]" \
        >"$tree/sitecustomize.py"
      echo "== python"
      (
        cd "$tree"
        export PYTHONPATH=$tree LD_PRELOAD
        LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libubsan.so)"
        LD_PRELOAD+=" $(c++ -print-file-name=libstdc++.so)"
        "$python" -c "from headrace.runtime.ops import native; assert native._native.__file__.startswith('$tree/')"
        "$python" -m pytest -p no:cacheprovider tests/runtime/ops/test_native_{kernels,lifetime,weights}.py
        "$python" -m tests.fuzz kernels kernel-pass kernel-mixers --seconds 60
      )
      ;;
    *)
      echo "address, thread, plain, aarch64 or python, not $kind" >&2
      exit 2
      ;;
  esac
done
