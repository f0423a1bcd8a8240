"""AMD: hipBLASLt, aiter, graphs, and what ROCm's tools say of a device."""

from hal.backend import Backend

backend = Backend(
    "rocm",
    declarations=tuple(f"hal_rocm.{name}" for name in ("linear", "a8w8", "norms", "small", "attention", "moe")),
    probe="hal_rocm.probe:probe",
    capture="hal_triton.graphs:capture",
    place="cuda:0",
)
