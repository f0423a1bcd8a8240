"""Any op's cases against any kernel: made-up inputs, poisoned memory, a float64 oracle."""

from hal.conformance.run import Verdict, verify, verify_kernel

__all__ = ["Verdict", "verify", "verify_kernel"]
