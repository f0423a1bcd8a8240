"""Timing: an op's problem in memory that no cache holds, every eligible kernel on it, the device's ceiling."""

from hal.bench.problem import Problem, problem
from hal.bench.timing import ceiling, microseconds

__all__ = ["Problem", "ceiling", "microseconds", "problem"]
