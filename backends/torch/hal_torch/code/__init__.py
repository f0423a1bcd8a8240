"""The code of the plain torch kernels; imported when a kernel is loaded, not before."""
