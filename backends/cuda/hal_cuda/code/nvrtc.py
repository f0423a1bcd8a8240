"""CUDA C++ of this backend: compiled by NVRTC at bind, launched on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hal.errors import HalError

HERE = Path(__file__).parent


def _done(answer: tuple[Any, ...], what: str) -> Any:
    """What a call gave; its error raises."""
    error, *values = answer
    if int(error):
        raise HalError(f"{what}: {error.name}")
    return values[0] if values else None


@cache
def compiled(file: str, arch: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code of a file beside this one, for an architecture such as ``sm_90``. Errors: HalError with the log."""
    from cuda.bindings import nvrtc

    source = (HERE / file).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []), file)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in defines]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error):
        log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program), file))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise HalError(f"{file} for {arch}: {error.name}: {log.decode(errors='replace').rstrip(chr(0))}")
    code = bytes(_done(nvrtc.nvrtcGetCUBINSize(program), file))
    _done(nvrtc.nvrtcGetCUBIN(program, code), file)
    nvrtc.nvrtcDestroyProgram(program)
    return code


@cache
def _function(file: str, name: str, arch: str, defines: tuple[tuple[str, int], ...]) -> Any:
    """A kernel of no context yet: it runs in that of the stream it is launched on."""
    from cuda.bindings import driver

    code = compiled(file, arch, defines)
    library = _done(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0), file)
    return driver.CUfunction(int(_done(driver.cuLibraryGetKernel(library, name.encode()), name)))


class Function:
    """A kernel ``name`` of a file, compiled with these definitions.

    Clusters of ``cluster`` blocks share an SM group; ``overlaps``: it may start while the kernel
    before it still runs, and waits by itself (griddepcontrol).
    """

    def __init__(
        self, file: str, name: str, arch: str, defines: Mapping[str, int], *, threads: int, cluster: int, overlaps: bool
    ) -> None:
        import torch
        from cuda.bindings import driver

        self.name, self._driver = name, driver
        self._stream = torch.cuda.current_stream
        self._stream()  # starts CUDA
        self._function = _function(file, name, arch, tuple(sorted(defines.items())))
        self._config = config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = threads, 0
        kinds, attributes = driver.CUlaunchAttributeID, []
        if cluster > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attributes[-1].value = value
        if overlaps:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attributes[-1].value = value
        config.attrs, config.numAttrs = attributes, len(attributes)

    def __call__(self, blocks: int, arguments: ctypes.Structure) -> None:
        """Launch ``blocks`` blocks; the arguments are one structure, copied here."""
        self._config.gridDimX, self._config.hStream = blocks, self._stream().cuda_stream
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _done(self._driver.cuLaunchKernelEx(self._config, self._function, ctypes.addressof(pointers), 0), self.name)
