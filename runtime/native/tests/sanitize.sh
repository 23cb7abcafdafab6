#!/usr/bin/env bash
# The kernels under the address and undefined-behaviour sanitizers, then under the thread sanitizer.
# Needs cmake and a C++20 compiler; no Python, no MLX.   Usage: runtime/native/tests/sanitize.sh [build folder]
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
build=${1:-$root/build/sanitize}

run() {  # name, flags
  cmake -S "$root" -B "$build/$1" -DHEADRACE_DRIVER=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="$2 -g1" >/dev/null
  cmake --build "$build/$1" --parallel 2 >/dev/null
  echo "== $1"
  "$build/$1/kernel_driver"
}

run address "-fsanitize=address,undefined -fno-sanitize-recover=all"
run thread "-fsanitize=thread"
