"""The spectral step by Triton kernels, on GPUs that have them: `plan` who goes where, `filter` the
products, `step` the order of launches. The plain step of `spectral_step` is its oracle."""
