"""ONNX export, imported as ``ms_flash.onnx_export``.

Nothing is here yet. The converter from a MindSpore net with fused or explicit attention to a checked ONNX model, its
profiles and the ONNX Runtime op will live here.
"""
