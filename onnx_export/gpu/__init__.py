"""Attention on GPUs: CUDA kernels that say what has to be computed, and a Triton kernel that does it fast."""
