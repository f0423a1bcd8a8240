"""Any op's cases against any kernel: made-up inputs, poisoned memory, a float64 oracle."""

from hal.conformance.run import Verdict, fallbacks, verify, verify_kernel

__all__ = ["Verdict", "fallbacks", "verify", "verify_kernel"]
