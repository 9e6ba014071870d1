"""The Ascend C instructions in numpy: an opinion on the documented behaviour that owes nothing to the host twin.

Every function takes the memories of one core and the arguments of one instruction, and changes the memories in place.
Written from the API pages alone; where they leave a choice (the order of a sum, fused or separate rounding), the
tests accept every documented reading.
"""
