"""Triton kernels that both vendors run."""

from hal.backend import Backend

backend = Backend("triton", declarations=("hal_triton.norms",))
