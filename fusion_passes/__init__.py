"""Graph fusion, imported as ``ms_flash.fusion_passes``.

Nothing is here yet. The pass that finds attention written with MindSpore's own ops and replaces it by
``ms_flash.flash_attention``, the report that says why a place was left alone, and the parity check will live here.
"""
