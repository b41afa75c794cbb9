"""Triton kernels of the fused decoder, one file each; only this file does without Triton."""
