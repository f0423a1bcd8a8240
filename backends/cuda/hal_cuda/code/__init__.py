"""The code of CUDA's kernels; imported when a kernel is loaded, not before."""
