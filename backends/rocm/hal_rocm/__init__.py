"""AMD: what ROCm's tools say of a device."""

from hal.backend import Backend

backend = Backend("rocm", probe="hal_rocm.probe:probe", capture="hal_triton.graphs:capture", place="cuda:0")
