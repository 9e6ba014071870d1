"""Kernels and ``ops.yaml``, the one table of ops; imported as ``ms_flash.op_impl`` and holding no Python of its own."""
