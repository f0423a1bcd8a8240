"""AMD: hipBLASLt, aiter, graphs, and what ROCm's tools say of a device."""

from hal.backend import Backend

backend = Backend(
    "rocm",
    declarations=("hal_rocm.linear", "hal_rocm.norms", "hal_rocm.small", "hal_rocm.attention", "hal_rocm.moe"),
    probe="hal_rocm.probe:probe",
    capture="hal_triton.graphs:capture",
    place="cuda:0",
)
