"""CUDA C++ of this backend: compiled by NVRTC at bind, launched on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hal.errors import HalError

HERE = Path(__file__).parent
GIVEN = 48 * 1024  # bytes of shared memory that a block may have without asking


def _done(answer: tuple[Any, ...], what: str) -> Any:
    """What a call gave; its error raises."""
    error, *values = answer
    if int(error):
        raise HalError(f"{what}: {error.name}")
    return values[0] if values else None


@cache
def compiled(file: str, arch: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """Machine code of a file beside this one, which may include others, for an architecture such as ``sm_90``.

    Errors: HalError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    source = (HERE / file).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(source, file.encode(), 0, [], []), file)
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"-I" + str(HERE).encode()]
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
def _function(file: str, name: str, arch: str, defines: tuple[tuple[str, int], ...], shared: int) -> Any:
    """A kernel of no context yet: it runs in that of the stream it is launched on."""
    import torch
    from cuda.bindings import driver

    code = compiled(file, arch, defines)
    library = _done(driver.cuLibraryLoadData(code, None, None, 0, None, None, 0), file)
    kernel = _done(driver.cuLibraryGetKernel(library, name.encode()), name)
    if shared > GIVEN:
        kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _done(driver.cuDeviceGet(torch.cuda.current_device()), name)
        _done(driver.cuKernelSetAttribute(kind, shared, kernel, device), name)
    return driver.CUfunction(int(kernel))


class Map(ctypes.Structure):
    """A tensor map: what the copy engine is told of a tensor in memory."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Map:
    """Boxes of a bfloat16 tensor in rows of 128 bytes, swizzled by eights; zeros are read outside.

    The innermost dimension first; ``strides`` in bytes, of all dimensions but that. Errors: HalError
    for addresses and strides that are no multiple of 16 bytes.
    """
    from cuda.bindings import driver

    long, short = driver.cuuint64_t, driver.cuuint32_t
    made = _done(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            address,
            [long(n) for n in sizes],
            [long(n) for n in strides],
            [short(n) for n in box],
            [short(1) for _ in sizes],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"tensor map of {list(sizes)} with strides of {list(strides)} bytes at {address:#x}",
    )
    return Map.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(Map)))


class Function:
    """A kernel ``name`` of a file, compiled with these definitions.

    Clusters of ``cluster`` blocks share an SM group; ``shared`` bytes of memory a block beside what the
    code declares; ``overlaps``: it may start while the kernel before it still runs, and waits by
    itself (griddepcontrol).
    """

    def __init__(
        self,
        file: str,
        name: str,
        arch: str,
        defines: Mapping[str, int],
        *,
        threads: int,
        cluster: int = 1,
        shared: int = 0,
        overlaps: bool,
    ) -> None:
        import torch
        from cuda.bindings import driver

        self.name, self._driver = name, driver
        self._stream = torch.cuda.current_stream
        self._stream()  # starts CUDA
        self._function = _function(file, name, arch, tuple(sorted(defines.items())), shared)
        self._config = config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = threads, shared
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
