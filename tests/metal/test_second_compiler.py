"""Metal sources in clang, as C++ for OpenCL: address spaces and types that g++ does not check."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.metal.emulator import GOLDEN

_CLANG = Path(sysconfig.get_path("scripts")) / "clang-include-cleaner"  # the smallest package with clang in it
_HEADER = Path(__file__).with_name("opencl.h")
_OPTIONS = ["-x", "clcpp", "-cl-std=CLC++2021", "-target", "spir64", "-Wall", "-Wextra", "-Werror"]
_OPTIONS += ["-Xclang", "-cl-ext=-all,+cl_khr_fp16"]  # no doubles and no generic pointers, as in Metal
_ATTRIBUTE = re.compile(r"\[\[\w+(\(\d+\))?\]\]")

pytestmark = pytest.mark.skipif(not _CLANG.exists(), reason="needs clang-include-cleaner")


def test_sources_compile(tmp_path: Path) -> None:
    kernels = re.split(r"(?m)^(?=template <typename)", GOLDEN.read_text(encoding="utf-8"))[1:]
    assert len(kernels) > 5
    assert _errors(tmp_path, "".join(_instance(kernel, place) for place, kernel in enumerate(kernels))) == ""


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("const half* here = x; y[0] = here[0];", "__global half"),
        ("threadgroup float both[2]; both[0] = 1; const float* here = both; y[0] = half(here[0]);", "__local float"),
        ("for (int i = 0; i < 2; ++i) { threadgroup float one[1]; one[0] = 1; y[i] = half(one[0]); }", "outermost"),
        ("threadgroup float both[2] = {1, 2}; y[0] = half(both[0]);", "initializer"),
        ("double wide = x[0]; y[0] = half(wide);", "double"),
    ],
)
def test_wrong_metal_sources_do_not_compile(fault: str, error: str, tmp_path: Path) -> None:
    kernel = f"__kernel void wrong(const device half* x, device half* y) {{ {fault} }}\n"
    assert error in _errors(tmp_path, kernel)


def _instance(source: str, place: int) -> str:
    """Return a kernel for its template's arguments: kernels of OpenCL are no templates."""
    body, _, instance = source.partition("\ntemplate [[host_name")
    head = re.match(r"template <(.+?)>\n", body)
    arguments = re.search(r"decltype\(\w+<(.+?)>\)", instance)
    assert head
    assert arguments
    names = [
        f"typedef {value} {name};" if kind == "typename" else f"constexpr constant {kind} {name} = {value};"
        for (kind, name), value in zip(
            (parameter.split() for parameter in head[1].split(", ")), arguments[1].split(", "), strict=True
        )
    ]
    plain = _ATTRIBUTE.sub("", body[head.end() :]).strip()
    return f"namespace kernel{place} {{\n" + "\n".join(names) + f"\n__kernel {plain}\n}}\n"


def _errors(folder: Path, code: str) -> str:
    """Return what clang says about code."""
    path = folder / "kernels.clcpp"
    path.write_text(f'#include "{_HEADER}"\n{code}', encoding="utf-8")
    command = [_CLANG, path, "--", *_OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr
