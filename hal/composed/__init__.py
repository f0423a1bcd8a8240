"""Kernels made of finer ops only: no vendor, no tensor library, just what runs after what."""

from hal.backend import Backend

backend = Backend("composed", declarations=("hal.composed.kernels",))
