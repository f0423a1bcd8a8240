"""NVIDIA: what CUDA's tools say of a device."""

from hal.backend import Backend

backend = Backend("cuda", probe="hal_cuda.probe:probe")
