# Generated from notebooks/13_kernels.ipynb by `helios export`; edit the notebook.
"""Kernels of our own.

C functions compiled on this machine, for this machine, in a second: found by name, given pointers
to tensors, and cached on disk. Where there is no compiler, everything still runs on PyTorch's own
operators.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helios.model.embedded import cache_home

__all__ = ["FLAGS", "NoKernels", "TYPES", "build", "compile_kernels", "cpu_flags", "find_compiler", "loaded_openmp"]


class NoKernels(RuntimeError):
    """C kernels cannot be built here; the message says why."""


FLAGS = ["-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-Wall", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]


@cache
def find_compiler() -> tuple[str, str]:
    """The C compiler's path (`$CC`, cc, gcc or clang) and its version. Raises NoKernels if there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            return path, told.stdout.partition("\n")[0]
    raise NoKernels("there is no C compiler (on Debian or Ubuntu: apt-get install gcc)")


def loaded_openmp() -> str | None:
    """The OpenMP runtime in this process (torch brings one), or None where that cannot be told."""
    maps = Path("/proc/self/maps")
    text = maps.read_text("utf-8") if maps.exists() else ""
    found = re.search(r"/\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*", text)
    return found[0] if found else None


def cpu_flags() -> str:
    """What this CPU can do, as text: a kernel built for another CPU must not be taken from the cache."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:.*$", info.read_text("utf-8"), re.M) if info.exists() else None
    return found[0] if found else platform.processor()


def build(source: str, flags: list[str]) -> Path:
    """Compile C `source` into a shared library in the cache folder, unless it is there. Raises NoKernels."""
    compiler, version = find_compiler()
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    openmp = loaded_openmp()
    command = [compiler, *FLAGS, native, *flags]
    facts = "\n".join([source, version, *command, openmp or "", cpu_flags()])
    library = cache_home() / "kernels" / f"{hashlib.sha256(facts.encode()).hexdigest()[:20]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, objects, linked = (Path(folder, name) for name in ("kernels.c", "kernels.o", "kernels.so"))
        code.write_text(source, "utf-8")
        _run([*command, "-c", str(code), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), "-o", str(linked), *([openmp] if openmp else ["-fopenmp"]), "-lm"])
        os.replace(linked, library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise NoKernels(f"the C compiler refused: {lines[0].strip()}")


TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}


def compile_kernels(source: str, functions: Mapping[str, str], flags: list[str]) -> SimpleNamespace:
    """The named functions of C `source`, ready to call; each value has a letter per argument.

    p: an address (`tensor.data_ptr()`, or None for NULL), l: long, i: int, f: float. Names with no letters are int
    constants. Calls release the GIL. Raises NoKernels if there is no compiler, or it refuses.
    """
    path = build(source, flags)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"the compiled kernels cannot be loaded: {error}") from error
    found: dict[str, Callable[..., None] | int] = {}
    for name, letters in functions.items():
        if not letters:
            found[name] = ctypes.c_int.in_dll(library, name).value
            continue
        function = getattr(library, name)
        function.argtypes, function.restype = [TYPES[letter] for letter in letters], None
        found[name] = function
    return SimpleNamespace(**found)
