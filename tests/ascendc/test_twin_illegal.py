"""Calls the hardware does not have, or would take for others: the host twin refuses each, and names what is wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest
from ascendc.draws import random_bytes
from ascendc.model.memory import SIZES, Operand

UB = SIZES["UB"]

COPY = {"dtype": "half", "dst": "UB", "dst_at": 0, "src": "gm", "src_at": 0, "block_count": 2, "block_len": 4}
COPY |= {"src_gap": 0, "dst_gap": 0}
OUT = COPY | {"dst": "gm", "src": "UB"}
PAD = {"dtype": "half", "dst": "UB", "dst_at": 0, "src": "gm", "src_at": 0, "block_count": 2, "block_len": 40}
PAD |= {"src_stride": 0, "dst_stride": 0, "pad": (1, 1, 0)}
PAD_OUT = {"dtype": "half", "dst": "gm", "dst_at": 0, "src": "UB", "src_at": 0, "block_count": 2, "block_len": 40}
PAD_OUT |= {"src_stride": 0, "dst_stride": 0}
NZ = {"core": "AIC", "dtype": "half", "dst_at": 0, "src_at": 0, "nd_num": 1, "n_value": 16, "d_value": 16}
NZ |= {"src_matrix": 0, "src_row": 16, "strip": 16, "dst_row": 1, "dst_matrix": 0}
LANES = {"dtype": "half", "dst": Operand(0), "src": Operand(4096), "mask": ("first", 128), "repeat": 2}
UNARY = LANES | {"family": "unary"}
SCALAR = LANES | {"family": "scalar", "scalar": 1.0}
BINARY = {"family": "binary", "dtype": "float", "dst": Operand(0), "src0": Operand(4096), "src1": Operand(8192)}
BINARY |= {"mask": ("first", 64), "repeat": 2}
CAST = {"src_type": "float", "dst_type": "half", "mode": 1, "dst": Operand(0, 1, 4), "src": Operand(4096)}
CAST |= {"mask": ("first", 64), "repeat": 2}
LOAD = {"core": "AIC", "dtype": "half", "dst": "L0A", "dst_at": 0, "src_at": 0, "start_index": 0, "repeat": 2}
LOAD |= {"src_stride": 1, "dst_gap": 0, "transpose": False}
TURN = {"core": "AIC", "dtype": "float", "dst": "L0B", "dst_at": 0, "src_at": 0, "start_index": 0, "repeat": 2}
TURN |= {"src_stride": 1, "dst_gap": 1, "frac_gap": 0}
MMAD = {"core": "AIC", "dtype": "half", "c_at": 0, "a_at": 0, "b_at": 0, "m": 32, "n": 32, "k": 32, "init": True}
FIX = {"core": "AIC", "dtype": "float", "to": "float", "dst": "gm", "dst_at": 0, "src_at": 0, "n_size": 32}
FIX |= {"m_size": 32, "src_stride": 32, "dst_stride": 32, "nz": False, "relu": False, "nd": (1, 0, 0)}
STRIP = FIX | {"nz": True, "dst_stride": 64}
DUPLICATE = {"family": "", "dtype": "float", "dst": Operand(0), "scalar": 1, "mask": ("first", 64), "repeat": 2}
BRCB = {"family": "", "dtype": "float", "dst": Operand(0), "src_at": 8192, "repeat": 2}
COMPARE = {"family": "", "dtype": "float", "mode": 0, "dst_at": 0, "src0": Operand(4096)}
COMPARE |= {"src1": Operand(8192), "count": 64}
LIMIT = {"family": "", "dtype": "float", "mode": 0, "dst_at": 0, "src0": Operand(4096), "scalar": 1, "count": 64}
SELECT = {"family": "", "dtype": "float", "mode": 2, "dst": Operand(0), "bits_at": 16384, "src0": Operand(4096)}
SELECT |= {"src1": Operand(8192), "mask": ("first", 64), "repeat": 2}
REDUCE = {"family": "", "dtype": "float", "dst_at": 0, "dst_repeat": 1, "src": Operand(4096), "mask": ("first", 64)}
REDUCE |= {"repeat": 2, "order": 0}
INDEX = {"family": "", "dtype": "float", "dst_at": 0, "scalar": 3, "count": 64}
FILL = {"core": "AIC", "family": "", "dtype": "half", "dst": "L1", "dst_at": 0, "repeat": 2, "block_num": 4}
FILL |= {"dst_gap": 0, "scalar": 0}

# Instruction, legal arguments, the change that spoils them, kinds that may be reported, a word of the message.
CASES = [
    # DataCopy
    ("DataCopy", COPY, {"block_count": 4096, "block_len": 1}, "parameter", "blockCount"),
    ("DataCopy", COPY, {"block_count": 65537}, "parameter", "blockCount"),
    ("DataCopy", COPY, {"block_len": 65536}, "parameter", "blockLen"),
    ("DataCopy", COPY, {"src_gap": 65536}, "parameter", "srcGap"),
    ("DataCopy", COPY, {"dst_gap": 65536}, "parameter", "dstGap"),
    ("DataCopy", COPY, {"block_count": -1}, "parameter", "blockCount"),
    ("DataCopy", COPY, {"dst_at": 16}, "alignment", "32"),
    ("DataCopy", COPY, {"src_at": 1}, "alignment", "src"),
    ("DataCopy", COPY, {"src_at": (256 << 10) - 96}, "bounds", "gm"),
    ("DataCopy", COPY, {"dst_at": UB - 96}, "bounds", "UB"),
    ("DataCopy", COPY, {"dst_gap": 6200}, "bounds", "UB"),
    ("DataCopy", COPY, {"src_gap": 9000}, "bounds", "gm"),
    ("DataCopy", COPY, {"count": 24}, "alignment", "count"),
    ("DataCopy", OUT, {"src_at": 16}, "alignment", "32"),
    ("DataCopy", OUT, {"dst_at": 3}, "alignment", "dst"),
    ("DataCopy", OUT, {"dst_at": (256 << 10) - 128}, "bounds", "gm"),
    ("DataCopy", COPY, {"core": "AIC", "dst": "L1", "dst_at": SIZES["L1"] - 32}, "bounds", "L1"),
    ("DataCopy", COPY, {"core": "AIC", "dst": "L0C"}, "parameter", "path"),
    ("DataCopy", COPY, {"core": "AIC"}, "core|bounds", "UB|AIC"),
    # DataCopyPad
    ("DataCopyPad", PAD, {"block_count": 4096}, "parameter", "blockCount"),
    ("DataCopyPad", PAD, {"block_len": 2097152, "block_count": 1}, "parameter", "blockLen"),
    ("DataCopyPad", PAD, {"block_len": 41}, "parameter", "blockLen"),
    ("DataCopyPad", PAD, {"src_stride": 1 << 32}, "parameter", "srcStride"),
    ("DataCopyPad", PAD, {"dst_stride": 1 << 32}, "parameter", "dstStride"),
    ("DataCopyPad", PAD, {"pad": (17, 0, 0)}, "parameter", "leftPadding"),
    ("DataCopyPad", PAD, {"pad": (0, 17, 0)}, "parameter", "rightPadding"),
    ("DataCopyPad", PAD, {"dst_at": 2}, "alignment", "32"),
    ("DataCopyPad", PAD, {"src_at": (256 << 10) - 60}, "bounds", "gm"),
    ("DataCopyPad", PAD, {"dst_stride": 7000}, "bounds", "UB"),
    ("DataCopyPad", PAD_OUT, {"block_count": 4096}, "parameter", "blockCount"),
    ("DataCopyPad", PAD_OUT, {"block_len": 2097152}, "parameter", "blockLen"),
    ("DataCopyPad", PAD_OUT, {"block_len": 41}, "parameter", "blockLen"),
    ("DataCopyPad", PAD_OUT, {"src_at": 8}, "alignment", "32"),
    ("DataCopyPad", PAD_OUT, {"dst_at": (256 << 10) - 60}, "bounds", "gm"),
    ("DataCopyPad", PAD_OUT, {"src_stride": 7000}, "bounds", "UB"),
    # Nd2Nz
    ("Nd2Nz", NZ, {"nd_num": 4096}, "parameter", "ndNum"),
    ("Nd2Nz", NZ, {"n_value": 16385}, "parameter", "nValue"),
    ("Nd2Nz", NZ, {"d_value": 65536}, "parameter", "dValue"),
    ("Nd2Nz", NZ, {"src_row": 65536}, "parameter", "srcDValue"),
    ("Nd2Nz", NZ, {"src_row": 0}, "parameter", "srcDValue"),
    ("Nd2Nz", NZ, {"src_matrix": 65536}, "parameter", "srcNdMatrixStride"),
    ("Nd2Nz", NZ, {"strip": 16385}, "parameter", "dstNzC0Stride"),
    ("Nd2Nz", NZ, {"strip": 0}, "parameter", "dstNzC0Stride"),
    ("Nd2Nz", NZ, {"dst_row": 16385}, "parameter", "dstNzNStride"),
    ("Nd2Nz", NZ, {"dst_row": 0}, "parameter", "dstNzNStride"),
    ("Nd2Nz", NZ, {"dst_matrix": 16385, "nd_num": 2}, "parameter", "dstNzMatrixStride"),
    ("Nd2Nz", NZ, {"dst_at": 16}, "alignment", "32"),
    ("Nd2Nz", NZ, {"n_value": 10000}, "bounds", "gm"),
    ("Nd2Nz", NZ, {"dst_at": SIZES["L1"] - 256}, "bounds", "L1"),
    # Vector: masks, repeats, strides, places
    ("Copy", LANES, {"repeat": 256}, "parameter", "repeat"),
    ("Copy", LANES, {"dst": Operand(0, 65536)}, "parameter", "dstStride"),
    ("Copy", LANES, {"src": Operand(4096, 1, 4096)}, "parameter", "srcRepeatSize"),
    ("Exp", UNARY, {"repeat": 256}, "parameter", "repeat"),
    ("Exp", UNARY, {"repeat": -1}, "parameter", "repeat"),
    ("Exp", UNARY, {"mask": ("first", 129)}, "parameter|mask", "mask"),
    ("Exp", UNARY, {"dtype": "float", "mask": ("first", 65)}, "parameter|mask", "mask"),
    ("Exp", UNARY, {"dtype": "float", "mask": ("bits", 3, 1)}, "parameter|mask", "mask"),
    ("Exp", UNARY, {"dst": Operand(0, 0)}, "parameter", "dstBlkStride"),
    ("Exp", UNARY, {"dst": Operand(0, 65536)}, "parameter", "dstBlkStride"),
    ("Exp", UNARY, {"dst": Operand(0, 1, 256)}, "parameter", "dstRepStride"),
    ("Exp", UNARY, {"src": Operand(4096, 65536, 8)}, "parameter", "srcBlkStride"),
    ("Exp", UNARY, {"src": Operand(4096, 1, 256)}, "parameter", "srcRepStride"),
    ("Exp", UNARY, {"dst": Operand(16)}, "alignment", "32"),
    ("Exp", UNARY, {"src": Operand(4112)}, "alignment", "32"),
    ("Exp", UNARY, {"dst": Operand(UB - 256)}, "bounds", "UB"),
    ("Exp", UNARY, {"src": Operand(UB - 256)}, "bounds", "UB"),
    ("Exp", UNARY, {"dst": Operand(4096 + 32)}, "parameter|RAW|WAR|bounds", "overlap"),
    ("Exp", UNARY, {"mask": ("count", 64), "dst.elements": 63}, "bounds", "tensor"),
    ("Exp", UNARY, {"core": "AIC"}, "core|bounds", "AIC"),
    ("Adds", SCALAR, {"repeat": 256}, "parameter", "repeat"),
    ("Muls", SCALAR, {"src": Operand(4096, 1, 300)}, "parameter", "srcRepStride"),
    ("Maxs", SCALAR, {"mask": ("first", 200)}, "parameter|mask", "mask"),
    ("Mins", SCALAR, {"dst": Operand(40)}, "alignment", "32"),
    ("ShiftLeft", SCALAR | {"dtype": "uint32_t", "mask": ("count", 64)}, {"scalar": 33}, "parameter", "scalar"),
    ("ShiftRight", SCALAR | {"dtype": "uint16_t", "mask": ("count", 64)}, {"scalar": 17}, "parameter", "scalar"),
    ("Add", BINARY, {"repeat": 256}, "parameter", "repeat"),
    ("Add", BINARY, {"mask": ("first", 65)}, "parameter|mask", "mask"),
    ("Add", BINARY, {"dst": Operand(0, 256)}, "parameter", "dstBlkStride"),
    ("Add", BINARY, {"src0": Operand(4096, 256)}, "parameter", "src0BlkStride"),
    ("Add", BINARY, {"src1": Operand(8192, 256)}, "parameter", "src1BlkStride"),
    ("Add", BINARY, {"dst": Operand(0, 1, 256)}, "parameter", "dstRepStride"),
    ("Add", BINARY, {"src0": Operand(4096, 1, 256)}, "parameter", "src0RepStride"),
    ("Add", BINARY, {"src1": Operand(8192, 1, 256)}, "parameter", "src1RepStride"),
    ("Mul", BINARY, {"dst": Operand(0, 0)}, "parameter", "dstBlkStride"),
    ("Mul", BINARY, {"src1": Operand(8200)}, "alignment", "32"),
    ("Mul", BINARY, {"src1": Operand(UB - 64)}, "bounds", "UB"),
    ("Duplicate", DUPLICATE, {"repeat": 256}, "parameter", "repeat"),
    ("Duplicate", DUPLICATE, {"dst": Operand(0, 0)}, "parameter", "dstBlockStride|dstBlkStride"),
    ("Duplicate", DUPLICATE, {"dst": Operand(0, 1, 256)}, "parameter", "dstRepeatStride|dstRepStride"),
    ("Duplicate", DUPLICATE, {"dst": Operand(8)}, "alignment", "32"),
    ("Brcb", BRCB, {"repeat": 256}, "parameter", "repeat"),
    ("Brcb", BRCB, {"dst": Operand(0, 0)}, "parameter", "dstBlkStride"),
    ("Brcb", BRCB, {"src_at": 8208}, "alignment", "32"),
    ("Brcb", BRCB, {"dst": Operand(UB - 256)}, "bounds", "UB"),
    ("Brcb", BRCB, {"src_at": 64}, "parameter|RAW|WAR|bounds", "overlap"),
    ("Compare", COMPARE, {"count": 63}, "parameter|alignment", "count|256"),
    ("Compare", COMPARE, {"dst_at": 8}, "alignment", "32"),
    ("Compare", COMPARE, {"dtype": "int32_t"}, "parameter", "EQ"),
    ("CompareScalar", LIMIT, {"count": 100}, "parameter|alignment", "count|256"),
    ("CompareScalar", LIMIT, {"dtype": "int32_t"}, "parameter", "EQ"),
    ("CompareScalar", LIMIT, {"src0": Operand(UB - 128)}, "bounds", "UB"),
    ("Select", SELECT, {"repeat": 256}, "parameter", "repeat"),
    ("Select", SELECT, {"mask": ("first", 65)}, "parameter|mask", "mask"),
    ("Select", SELECT, {"bits_at": 16400}, "alignment", "32"),
    ("Select", SELECT, {"src1": Operand(8200)}, "alignment", "32"),
    ("Select", SELECT, {"dst": Operand(0, 0)}, "parameter", "dstBlkStride"),
    ("WholeReduceMax", REDUCE, {"repeat": 256}, "parameter", "repeat"),
    ("WholeReduceMax", REDUCE, {"mask": ("first", 65)}, "parameter|mask", "mask"),
    ("WholeReduceMax", REDUCE, {"dst_at": 4}, "alignment", "8"),
    ("WholeReduceMax", REDUCE, {"dst_repeat": 65536}, "parameter", "dstRepStride"),
    ("WholeReduceSum", REDUCE, {"src": Operand(4096, 1, 65536)}, "parameter", "srcRepStride"),
    ("WholeReduceSum", REDUCE, {"src": Operand(4100)}, "alignment", "32"),
    ("BlockReduceMax", REDUCE, {"dst_at": 8}, "alignment", "32"),
    ("BlockReduceSum", REDUCE, {"repeat": 256}, "parameter", "repeat"),
    ("BlockReduceSum", REDUCE, {"src": Operand(4096, 65536, 8)}, "parameter", "srcBlkStride"),
    ("PairReduceSum", REDUCE, {"repeat": 256}, "parameter", "repeat"),
    ("PairReduceSum", REDUCE, {"dst_at": 16}, "alignment", "32"),
    ("Cast", CAST, {"mask": ("first", 65)}, "parameter|mask", "mask"),
    ("Cast", CAST, {"dst": Operand(0, 0, 4)}, "parameter", "dstBlkStride"),
    ("Cast", CAST, {"src": Operand(4096, 1, 256)}, "parameter", "srcRepStride"),
    ("Cast", CAST, {"dst_type": "bfloat16_t", "mode": 0}, "parameter", "NONE|round mode"),
    ("Cast", CAST, {"dst_type": "int32_t", "mode": 6}, "parameter", "ODD|round mode"),
    ("Cast", CAST, {"src_type": "half", "dst_type": "float", "mode": 1}, "parameter", "RINT|round mode"),
    ("Cast", CAST, {"src_type": "bfloat16_t", "dst_type": "float", "mode": 2}, "parameter", "FLOOR|round mode"),
    ("Cast", CAST, {"src_type": "int32_t", "dst_type": "int16_t", "mode": 3}, "parameter", "CEIL|round mode"),
    ("CreateVecIndex", INDEX, {"dst_at": 8}, "alignment", "32"),
    ("CreateVecIndex", INDEX, {"dst_at": UB - 32, "count": 9}, "bounds", "UB"),
    ("Fill", FILL, {"repeat": 32768}, "parameter", "repeatTimes"),
    ("Fill", FILL, {"block_num": 32768}, "parameter", "blockNum"),
    ("Fill", FILL, {"dst_gap": 32768}, "parameter", "dstGap"),
    ("Fill", FILL, {"dst_at": 16}, "alignment", "32"),
    ("Fill", FILL, {"dst_gap": 20000}, "bounds", "L1"),
    # L1 -> L0
    ("LoadData", LOAD, {"repeat": 256}, "parameter", "repeatTimes"),
    ("LoadData", LOAD, {"start_index": 65536}, "parameter", "startIndex"),
    ("LoadData", LOAD, {"src_stride": 65536}, "parameter", "srcStride"),
    ("LoadData", LOAD, {"dst_gap": 65536}, "parameter", "dstGap"),
    ("LoadData", LOAD, {"dst_at": 256}, "alignment", "512"),
    ("LoadData", LOAD, {"src_at": 16}, "alignment", "32"),
    ("LoadData", LOAD, {"dst_gap": 200}, "bounds", "L0A"),
    ("LoadData", LOAD, {"start_index": 1023}, "bounds", "L1"),
    ("LoadData", LOAD, {"dtype": "float", "transpose": True}, "parameter", "ifTranspose|16"),
    ("LoadData", LOAD, {"dtype": "int8_t", "transpose": True}, "parameter", "ifTranspose|16"),
    ("LoadData", LOAD, {"dst": "L0C"}, "parameter", "L0"),
    ("LoadDataWithTranspose", TURN, {"repeat": 256}, "parameter", "repeatTimes"),
    ("LoadDataWithTranspose", TURN, {"frac_gap": 65536}, "parameter", "dstFracGap"),
    ("LoadDataWithTranspose", TURN, {"dst_gap": 65536}, "parameter", "dstGap"),
    ("LoadDataWithTranspose", TURN, {"src_stride": 65536}, "parameter", "srcStride"),
    ("LoadDataWithTranspose", TURN, {"dst_at": 128}, "alignment", "512"),
    ("LoadDataWithTranspose", TURN, {"frac_gap": 126}, "bounds", "L0B"),
    ("LoadDataWithTranspose", TURN, {"dst_gap": 0}, "parameter|WAW", "overlap"),
    # Mmad and Fixpipe
    ("Mmad", MMAD, {"m": 4096}, "parameter", "m = 4096"),
    ("Mmad", MMAD, {"n": 4096}, "parameter", "n = 4096"),
    ("Mmad", MMAD, {"k": 4096}, "parameter", "k = 4096"),
    ("Mmad", MMAD, {"m": 65552}, "parameter", "m = 65552"),
    ("Mmad", MMAD, {"unit_flag": 1}, "parameter", "unitFlag"),
    ("Mmad", MMAD, {"c_at": 512}, "alignment", "1024"),
    ("Mmad", MMAD, {"a_at": 256}, "alignment", "512"),
    ("Mmad", MMAD, {"b_at": 32}, "alignment", "512"),
    ("Mmad", MMAD, {"m": 2048, "k": 64}, "bounds", "L0A"),
    ("Mmad", MMAD, {"n": 2048, "k": 64}, "bounds", "L0B"),
    ("Mmad", MMAD, {"m": 512, "n": 512, "k": 16}, "bounds", "L0C"),
    ("Mmad", MMAD, {"bias_at": 32}, "alignment", "64"),
    ("Fixpipe", FIX, {"n_size": 4096}, "parameter", "nSize"),
    ("Fixpipe", FIX, {"m_size": 8193}, "parameter", "mSize"),
    ("Fixpipe", STRIP, {"m_size": 65536}, "parameter", "mSize"),
    ("Fixpipe", FIX, {"src_stride": 65536}, "parameter", "srcStride"),
    ("Fixpipe", FIX, {"dst_stride": 0}, "parameter", "dstStride"),
    ("Fixpipe", FIX, {"dst_stride": 1 << 32}, "parameter", "dstStride"),
    ("Fixpipe", FIX, {"nd": (65536, 1, 1)}, "parameter", "ndNum"),
    ("Fixpipe", FIX, {"nd": (2, 513, 2048)}, "parameter", "srcNdStride"),
    ("Fixpipe", FIX, {"nd": (2, 4, 65536)}, "parameter", "dstNdStride"),
    ("Fixpipe", STRIP, {"n_size": 24}, "parameter", "nSize"),
    ("Fixpipe", FIX, {"quant": 1}, "parameter", "quantPre"),
    ("Fixpipe", FIX | {"to": "half"}, {"quant": 0}, "parameter", "quantPre"),
    ("Fixpipe", FIX | {"to": "half"}, {"quant": 2}, "parameter", "quantPre"),
    ("Fixpipe", FIX | {"to": "bfloat16_t"}, {"quant": 1}, "parameter", "quantPre"),
    ("Fixpipe", FIX, {"src_at": 32}, "alignment", "64"),
    ("Fixpipe", STRIP, {"dst_at": 16}, "alignment", "32"),
    ("Fixpipe", FIX, {"unit_flag": 1}, "parameter", "unitFlag"),
    ("Fixpipe", FIX, {"src_stride": 2048}, "bounds", "L0C"),
    ("Fixpipe", FIX, {"dst_at": (256 << 10) - 4000}, "bounds", "gm"),
    ("Fixpipe", FIX, {"dst_stride": 16}, "parameter|WAW", "overlap|dstStride"),
]


def _name(case):
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[2].items())])


@pytest.fixture(scope="module")
def memories():
    images = random_bytes(np.random.default_rng(), *SIZES)
    images["UB"][:] = 0  # no stray NaN, and offsets of 0 for Gather
    return images


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_refused(driver, memories, case):
    op, legal, change, kinds, words = case
    legal = {"core": "AIV", **legal}
    assert not driver(op, memories.copy(), **legal), "the call is wrong even without the change"
    faults = driver(op, memories.copy(), **{**legal, **change})
    assert faults, "not refused"
    assert any(fault.kind in kinds.split("|") and re.search(words, fault.text) for fault in faults), faults[0].text


def test_enough_cases():
    assert len(CASES) >= 100
