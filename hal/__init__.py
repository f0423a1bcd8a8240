"""A hardware abstraction layer for LLM inference: ops say what, kernels say how, choices say why.

``import hal`` imports nothing heavy; every name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal import ops as ops
    from hal.backend import Backend as Backend
    from hal.batch import Batch as Batch
    from hal.batch import Sampling as Sampling
    from hal.batch import make_batch as make_batch
    from hal.binding import Bound as Bound
    from hal.choice import Choice as Choice
    from hal.device import Device as Device
    from hal.device import load_device as load_device
    from hal.errors import HalError as HalError
    from hal.kernel import Kernel as Kernel
    from hal.kernel import Part as Part
    from hal.kernel import kernel as kernel
    from hal.policy import Policy as Policy
    from hal.probing import probe as probe
    from hal.registry import Registry as Registry
    from hal.requirement import Reason as Reason
    from hal.resolving import Resolver as Resolver
    from hal.runtime import Runtime as Runtime

__version__ = "0.1.0"

_HOMES = {
    "Backend": "backend",
    "Batch": "batch",
    "Bound": "binding",
    "Choice": "choice",
    "Device": "device",
    "HalError": "errors",
    "Kernel": "kernel",
    "Part": "kernel",
    "Policy": "policy",
    "Reason": "requirement",
    "Registry": "registry",
    "Resolver": "resolving",
    "Runtime": "runtime",
    "Sampling": "batch",
    "load_device": "device",
    "make_batch": "batch",
    "probe": "probing",
}
__all__ = ["__version__", "kernel", "ops", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("hal.ops")
    if name in _HOMES:
        return getattr(import_module(f"hal.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hal' has no attribute {name!r}")
