"""NVIDIA: cuBLAS, CUDA C++, FlashInfer, graphs, and what CUDA's tools say of a device."""

from hal.backend import Backend

backend = Backend(
    "cuda",
    declarations=("hal_cuda.linear", "hal_cuda.few_rows", "hal_cuda.gated_delta", "hal_cuda.flashinfer"),
    probe="hal_cuda.probe:probe",
    capture="hal_triton.graphs:capture",
    place="cuda:0",
)
