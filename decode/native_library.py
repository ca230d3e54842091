"""The C++ of this package, compiled for the machine at hand."""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("native.cpp", "native_sampling.cpp", "native_round.cpp")]
HEADERS = [Path(__file__).with_name(f"native{name}.h") for name in ("", "_matrix", "_amx", "_avx512", "_sampling")]
FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-mfma"]
FLAGS += [f"-mavx512{name}" for name in ("f", "bw", "vl", "dq")]
# for CPUs with bf16 matrix units; native.cpp has another way for those without
UNITS = ["-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
BYTE_PRODUCTS = "-mavx512vnni"  # products of 8 bits; without, native_avx512.h makes them of 16
INSTRUCTIONS = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")

Address = ctypes.c_void_p
Size = ctypes.c_int64


class Unavailable(Exception):
    """Why a model, or this machine, has to do without."""


@functools.cache
def native_library(with_units: bool = True) -> ctypes.CDLL:
    """The C++, compiled once a machine and kept in the user's cache folder.

    Args:
        with_units: False leaves matrix units unused where there are some.

    Raises:
        Unavailable: no such processor or compiler, or a folder that cannot be written to.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise Unavailable(f"it is made for Linux on x86-64, and this is {platform.system()} on {platform.machine()}")
    has = torch.cpu.get_capabilities()
    if not all(has.get(name) for name in INSTRUCTIONS):
        raise Unavailable("this processor has no AVX-512 (F, BW, VL and DQ)")
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise Unavailable(f"there is no C++ compiler {compiler[0]}")
    if with_units and all(has.get(name) for name in ("avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")):
        try:
            library = _load([*compiler, *FLAGS, *UNITS])
            if library.request_units() == 0:
                return _declared(library)
            logger.info("C++ without matrix units: the system does not grant their use")
        except Unavailable as reason:  # a compiler that does not know them
            logger.info("C++ without matrix units: %s", reason)
    bytewise = [BYTE_PRODUCTS] if has.get("avx512_vnni") else []
    return _declared(_load([*compiler, *FLAGS, *bytewise]))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The same, which now knows its arguments."""
    library.forward.restype = library.draft.restype = Size
    library.forward.argtypes = [Address] * 3 + [Size] * 3 + [Address] * 7 + [Size]
    library.draft.argtypes = [*[Address] * 3, *[Size] * 3, *[Address] * 7, Size, *[Address] * 2, Size]
    library.judge.argtypes = [*[Address] * 2, *[Size] * 2, *[Address] * 8, Size]
    for name in ("draw", "bound_rows", "spread_out", "arrive", "log_sum_exp", "judge"):
        getattr(library, name).restype = None
    rows = [Address] + [Size] * 3
    library.draw.argtypes = [*rows, *[Address] * 5, Size]
    library.bound_rows.argtypes = [*rows, *[Address] * 5, Size]
    library.spread_out.argtypes = [*rows, *[Address] * 2, Size, *[Address] * 2]
    library.arrive.argtypes = [Address, Size, Size, Address, Size, Address, Address, Size]
    library.log_sum_exp.argtypes = [*rows, Address, Size]
    return library


def _load(command: list[str]) -> ctypes.CDLL:
    """What the command makes of the C++.

    Raises:
        Unavailable: it makes nothing of it, or there is no folder for it.
    """
    try:
        return _kept(command)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "").strip() or str(error)
        raise Unavailable(f"compiling it failed: {said.splitlines()[0]}") from error


def _kept(command: list[str]) -> ctypes.CDLL:
    """The same, made once, and once more where what was kept cannot be loaded."""
    made_of = [path.read_bytes() for path in (*HEADERS, *SOURCES)] + [
        " ".join([*command, *platform.libc_ver()]).encode()
    ]
    key = hashlib.sha256(b"".join(made_of)).hexdigest()[:16]
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith" / f"native-{key}.so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(path))
    logger.info("compiling C++ into %s, once for this machine", path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may be at it
        made = Path(folder) / path.name
        arguments = [*command, *map(str, SOURCES), "-o", str(made)]
        subprocess.run(arguments, check=True, capture_output=True, text=True, errors="replace")
        made.replace(path)
    return ctypes.CDLL(str(path))
