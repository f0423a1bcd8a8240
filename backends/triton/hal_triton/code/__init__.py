"""The code of the Triton kernels; imported when a kernel is loaded, not before."""
