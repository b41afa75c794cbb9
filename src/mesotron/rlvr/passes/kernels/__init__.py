"""Triton kernels of a block of ragged rows; the functions of `blocks` are their oracles."""
