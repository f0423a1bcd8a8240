"""NVIDIA: cuBLAS, CUDA C++, FlashInfer, graphs, and what CUDA's tools say of a device."""

from hal.backend import Backend

backend = Backend(
    "cuda",
    declarations=tuple(f"hal_cuda.{name}" for name in ("linear", "few_rows", "scaled", "gated_delta", "flashinfer")),
    probe="hal_cuda.probe:probe",
    capture="hal_triton.graphs:capture",
    place="cuda:0",
)
