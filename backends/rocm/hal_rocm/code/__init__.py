"""The code of AMD's kernels; imported when a kernel is loaded. aiter is imported there, and called by keyword."""
