"""The worked examples of the API pages, with their numbers, on the twin and on the numpy model alike."""

from __future__ import annotations

import numpy as np
import pytest
from ascendc.model import cast, cube, moves, reduce, vector
from ascendc.model.memory import DTYPES, SIZES, Memories, Operand

ROUND = ("NONE", "RINT", "FLOOR", "CEIL", "ROUND", "TRUNC", "ODD")


def _memories(gm=64, **images):
    memories = Memories({name: np.zeros(size, np.uint8) for name, size in SIZES.items()})
    memories["gm"] = np.zeros(gm, np.uint8)
    for name, values in images.items():
        memories.write(name, 0, values)
    return memories


def both(driver, op, model, memories, core="AIV", extra=None, **arguments):
    """Runs the call on the twin and on the model; the memories after each."""
    by_model = memories.copy()
    model(by_model, **arguments)
    faults = driver(op, memories, core=core, **(extra or {}), **arguments)
    assert not faults, faults[0].text
    return memories, by_model


def ub(memories, at, dtype, count):
    return memories.read("UB", at, DTYPES[dtype], count)


def test_brcb(driver):
    source = np.arange(1, 17, dtype=np.float16)
    arguments = {"dtype": "half", "dst": Operand(4096), "src_at": 0, "repeat": 2}
    for after in both(driver, "Brcb", vector.brcb, _memories(UB=source), extra={"family": ""}, **arguments):
        assert ub(after, 4096, "half", 256).tolist() == np.repeat(source, 16).tolist()


@pytest.mark.parametrize("mask", [("first", 128), ("bits", (1 << 64) - 1, (1 << 64) - 1), ("count", 256)])
def test_duplicate(driver, mask):
    arguments = {"dtype": "half", "dst": Operand(0), "scalar": 18.0, "mask": mask, "repeat": 2}
    for after in both(driver, "Duplicate", vector.duplicate, _memories(), extra={"family": ""}, **arguments):
        assert ub(after, 0, "half", 257).tolist() == [18.0] * 256 + [0.0]


def test_copy_with_gaps(driver):
    """112 halves: two bursts of three blocks, one block left out between them, two left free at the target."""
    source = np.arange(112, dtype=np.float16)
    arguments = {"dst": "UB", "dst_at": 0, "src": "gm", "src_at": 0, "block_count": 2, "block_len": 3}
    arguments |= {"src_gap": 1, "dst_gap": 2}
    memories = _memories(gm=224)
    memories.write("gm", 0, source)
    for after in both(driver, "DataCopy", moves.data_copy, memories, extra={"dtype": "half"}, **arguments):
        blocks = ub(after, 0, "half", 128).reshape(8, 16)[:, 0].tolist()
        assert blocks == [0, 16, 32, 0, 0, 64, 80, 96]


def test_copy_of_47_bytes(driver):
    """Each burst starts a block; the source goes on one byte after the last one."""
    memories = _memories(gm=512)
    memories["gm"][:] = np.arange(512) % 251
    arguments = {"dtype": "uint8_t", "dst_at": 0, "src_at": 0, "block_count": 2, "block_len": 47, "src_stride": 1}
    arguments |= {"dst_stride": 1, "pad": (0, 1, 7)}
    place = {"dst": "UB", "src": "gm"}
    for after in both(driver, "DataCopyPad", moves.pad_in, memories, extra=place, **arguments):
        assert after["UB"][:47].tolist() == list(range(47))
        assert after["UB"][47:64].tolist() == [7] * 17
        assert after["UB"][64:96].tolist() == [0] * 32
        assert after["UB"][96:143].tolist() == list(range(48, 95))


@pytest.mark.parametrize("dense", [True, False])
def test_nd2nz(driver, dense):
    """16 x 23 of pitch 32; and two matrices of 8 x 23, strips 37 blocks apart, rows 2, matrices 320 elements."""
    shape = {"dtype": "half", "dst_at": 0, "src_at": 0, "d_value": 23, "src_row": 32}
    if dense:
        shape |= {"nd_num": 1, "n_value": 16, "src_matrix": 0, "strip": 16, "dst_row": 1, "dst_matrix": 0}
    else:
        shape |= {"nd_num": 2, "n_value": 8, "src_matrix": 384, "strip": 37, "dst_row": 2, "dst_matrix": 320}
    source = np.arange(1, 769, dtype=np.float16)
    memories = _memories(gm=1536)
    memories.write("gm", 0, source)
    for after in both(driver, "Nd2Nz", moves.nd2nz, memories, core="AIC", **shape):
        got = after.read("L1", 0, DTYPES["half"], 2048)
        for matrix in range(shape["nd_num"]):
            for row in range(shape["n_value"]):
                at = matrix * shape["dst_matrix"] + row * shape["dst_row"] * 16
                line = source[matrix * shape["src_matrix"] + row * 32 :][:23].tolist()
                assert got[at : at + 16].tolist() == line[:16]
                assert got[at + shape["strip"] * 16 :][:16].tolist() == line[16:] + [0.0] * 9


def test_load_data(driver):
    """Four fractals of float, every second one, two free fractals between them."""
    source = np.repeat(np.arange(8, dtype=np.float32), 128)
    arguments = {"dtype": "float", "dst": "L0A", "dst_at": 0, "src_at": 0, "start_index": 1, "repeat": 4}
    arguments |= {"src_stride": 2, "dst_gap": 2, "transpose": False}
    for after in both(driver, "LoadData", cube.load_data, _memories(L1=source), core="AIC", **arguments):
        assert after.read("L0A", 0, DTYPES["float"], 1280)[::128].tolist() == [1, 0, 0, 3, 0, 0, 5, 0, 0, 7]


def test_load_data_transposes(driver):
    source = np.arange(256, dtype=np.float16)
    arguments = {"dtype": "half", "dst": "L0B", "dst_at": 0, "src_at": 0, "start_index": 0, "repeat": 1}
    arguments |= {"src_stride": 2, "dst_gap": 2, "transpose": True}
    for after in both(driver, "LoadData", cube.load_data, _memories(L1=source), core="AIC", **arguments):
        assert np.array_equal(after.read("L0B", 0, DTYPES["half"], 256).reshape(16, 16), source.reshape(16, 16).T)


@pytest.mark.parametrize(("dst_gap", "frac_gap"), [(1, 0), (0, 2)])
def test_load_data_with_transpose_b8(driver, dst_gap, frac_gap):
    """Three squares of 32 x 32 bytes: the two fractals of each behind each other, or in two groups of three."""
    source = np.random.default_rng(0).integers(-128, 128, 3072).astype(np.int8)
    arguments = {"dtype": "int8_t", "dst": "L0B", "dst_at": 0, "src_at": 0, "start_index": 0, "repeat": 3}
    arguments |= {"src_stride": 1, "dst_gap": dst_gap, "frac_gap": frac_gap}
    memories = _memories(L1=source)
    for after in both(driver, "LoadDataWithTranspose", cube.load_transposed, memories, core="AIC", **arguments):
        fractals = after.read("L0B", 0, DTYPES["int8_t"], 3072).reshape(6, 16, 32)
        for index in range(3):
            first = index * (1 + dst_gap)
            square = source.reshape(3, 32, 32)[index].T
            assert np.array_equal(fractals[first], square[:16])
            assert np.array_equal(fractals[first + 1 + frac_gap], square[16:])


def test_product_through_l1(driver):
    """40 x 70 by 70 x 50 in half, A as it is and B as it is: ND to NZ, NZ to Zz and Zn, the product, and out."""
    rng = np.random.default_rng(1)
    m, k, n = 40, 70, 50
    a, b = rng.integers(-4, 5, (m, k)).astype(np.float16), rng.integers(-4, 5, (k, n)).astype(np.float16)
    memories = _memories(gm=32768)
    memories.write("gm", 0, a)
    memories.write("gm", 8192, b)

    def step(op, model, **arguments):
        nonlocal memories
        memories, by_model = both(driver, op, model, memories, core="AIC", **arguments)
        return by_model

    rows, depth, cols = 3, 5, 4
    plain = {"dtype": "half", "nd_num": 1, "src_matrix": 0, "dst_row": 1, "dst_matrix": 0}
    step("Nd2Nz", moves.nd2nz, **plain, dst_at=0, src_at=0, n_value=m, d_value=k, src_row=k, strip=rows * 16)
    step("Nd2Nz", moves.nd2nz, **plain, dst_at=65536, src_at=8192, n_value=k, d_value=n, src_row=n, strip=depth * 16)
    load = {"dtype": "half", "start_index": 0, "dst_gap": 0}
    for i in range(rows):
        step("LoadData", cube.load_data, **load, dst="L0A", dst_at=i * depth * 512, src_at=i * 512, repeat=depth,
             src_stride=rows, transpose=False)  # fmt: skip
    for i in range(depth):
        step("LoadData", cube.load_data, **load, dst="L0B", dst_at=i * cols * 512, src_at=65536 + i * 512, repeat=cols,
             src_stride=depth, transpose=True)  # fmt: skip
    step("Mmad", cube.mmad, dtype="half", c_at=0, a_at=0, b_at=0, m=m, n=n, k=k, init=True)
    step("Fixpipe", cube.fixpipe, dtype="float", to="float", dst="gm", dst_at=16384, src_at=0, n_size=n, m_size=m,
         src_stride=48, dst_stride=n, nz=False, relu=False)  # fmt: skip
    got = memories.read("gm", 16384, DTYPES["float"], m * n).reshape(m, n)
    assert np.array_equal(got, a.astype(np.float32) @ b.astype(np.float32))


def test_fixpipe_two_matrices(driver):
    """Two NZ matrices of 48 x 32, strips of 64 rows, into rows of 64 elements, 4096 elements apart."""
    memories = _memories(gm=65536)
    memories.write("L0C", 0, np.arange(8192, dtype=np.float32))
    arguments = {"dtype": "float", "to": "float", "dst": "gm", "dst_at": 0, "src_at": 0, "n_size": 32, "m_size": 48}
    arguments |= {"src_stride": 64, "dst_stride": 64, "nz": False, "nd": (2, 16, 4096)}
    for after in both(driver, "Fixpipe", cube.fixpipe, memories, core="AIC", extra={"relu": False}, **arguments):
        out = after.read("gm", 0, DTYPES["float"], 8192).reshape(2, 64, 64)
        for matrix in range(2):
            strips = np.arange(8192, dtype=np.float32)[matrix * 4096 :][:2048].reshape(2, 64, 16)
            assert np.array_equal(out[matrix, :48, :32], np.hstack(strips)[:48])
            assert not out[matrix, :48, 32:].any()


# (source type, target type, value): mode -> result, as the page of Cast and that of the rounding rules have it.
ROUNDING = {
    ("half", "int32_t", 1.5): {"RINT": 2, "FLOOR": 1, "CEIL": 2, "ROUND": 2, "TRUNC": 1},
    ("half", "int32_t", 2.5): {"RINT": 2, "FLOOR": 2, "CEIL": 3, "ROUND": 3, "TRUNC": 2},
    ("half", "int32_t", 1.4): {"RINT": 1, "FLOOR": 1, "CEIL": 2, "ROUND": 1, "TRUNC": 1},
    ("half", "int32_t", 2.6): {"RINT": 3, "FLOOR": 2, "CEIL": 3, "ROUND": 3, "TRUNC": 2},
    ("half", "int8_t", 127.5): {"RINT": 127, "FLOOR": 127, "CEIL": 127, "ROUND": 127, "TRUNC": 127},
    ("half", "int16_t", 127.5): {"RINT": 128, "FLOOR": 127, "CEIL": 128, "ROUND": 128, "TRUNC": 127},
    ("int16_t", "half", 4098): {"RINT": 4096, "FLOOR": 4096, "CEIL": 4100, "ROUND": 4100, "TRUNC": 4096},
    ("int32_t", "float", 2**25 + 3): {
        "RINT": 2**25 + 4,
        "FLOOR": 2**25,
        "CEIL": 2**25 + 4,
        "ROUND": 2**25 + 4,
        "TRUNC": 2**25,
    },
    ("int32_t", "int16_t", 2**31 - 1): {"NONE": 2**15 - 1},
    ("float", "int16_t", 2.0**22 + 0.5): dict.fromkeys(("RINT", "FLOOR", "CEIL", "ROUND", "TRUNC"), 2**15 - 1),
    ("float", "int32_t", 2.0**22 + 0.5): {
        "RINT": 2**22,
        "FLOOR": 2**22,
        "CEIL": 2**22 + 1,
        "ROUND": 2**22 + 1,
        "TRUNC": 2**22,
    },
    ("float", "half", 0.5 + 2**-12): {
        "RINT": 0.5,
        "FLOOR": 0.5,
        "CEIL": 0.5 + 2**-11,
        "ROUND": 0.5 + 2**-11,
        "TRUNC": 0.5,
        "ODD": 0.5 + 2**-11,
    },
    ("float", "bfloat16_t", 0.5 + 2**-9 + 2**-11): {
        "RINT": 0.5 + 2**-8,
        "FLOOR": 0.5,
        "CEIL": 0.5 + 2**-8,
        "ROUND": 0.5 + 2**-8,
        "TRUNC": 0.5,
    },
    ("float", "float", 0.5): {"RINT": 0.0, "FLOOR": 0.0, "CEIL": 1.0, "ROUND": 1.0, "TRUNC": 0.0},
    ("uint8_t", "half", 255): {"NONE": 255.0},
    ("int8_t", "half", -1): {"NONE": -1.0},
}


@pytest.mark.parametrize(
    ("src", "dst", "value", "mode", "result"),
    [(*key, mode, result) for key, modes in ROUNDING.items() for mode, result in modes.items()],
)
def test_cast(driver, src, dst, value, mode, result):
    memories = _memories(UB=np.full(64, value, DTYPES[src]))
    memories_model = memories.copy()
    arguments = {"src_type": src, "dst_type": dst, "dst": Operand(4096), "src": Operand(0), "mask": ("count", 64)}
    cast.cast(memories_model, mode=mode, repeat=1, **arguments)
    faults = driver("Cast", memories, mode=ROUND.index(mode), repeat=1, **arguments)
    assert not faults, faults[0].text
    for after in (memories, memories_model):
        assert set(ub(after, 4096, dst, 64).astype(np.float64)) == {float(result)}


def test_cast_keeps_masked_lanes(driver):
    """The first 32 of the 64 lanes of each repeat, eight repeats: CEIL of half into int32."""
    source = np.random.default_rng(2).uniform(0, 100, 512).astype(np.float16)
    memories = _memories(UB=source)
    memories.write("UB", 8192, np.full(512, -7, np.int32))
    arguments = {"src_type": "half", "dst_type": "int32_t", "dst": Operand(8192, 1, 8), "src": Operand(0, 1, 4)}
    arguments |= {"mask": ("first", 32), "repeat": 8}
    faults = driver("Cast", memories, mode=ROUND.index("CEIL"), **arguments)
    assert not faults, faults[0].text
    got = ub(memories, 8192, "int32_t", 512).reshape(8, 64)
    assert np.array_equal(got[:, :32], np.ceil(source.reshape(8, 64)[:, :32].astype(np.float64)))
    assert (got[:, 32:] == -7).all()


@pytest.mark.parametrize(("mode", "byte"), [("GT", 240), ("GE", 241), ("LE", 15), ("EQ", 1), ("NE", 254), ("LT", 14)])
def test_compare(driver, mode, byte):
    """2 3 5 7 11 13 17 19 against 2 4 6 8 10 12 14 16; the bits run from the lowest up."""
    memories = _memories(UB=np.tile(np.array([2, 3, 5, 7, 11, 13, 17, 19], np.float32), 8))
    memories.write("UB", 4096, np.tile(np.array([2, 4, 6, 8, 10, 12, 14, 16], np.float32), 8))
    arguments = {"dtype": "float", "dst_at": 8192, "src0": Operand(0), "src1": Operand(4096)}
    model = memories.copy()
    vector.compare(model, mode=mode, repeat=1, **arguments)
    number = list(vector.COMPARE).index(mode)
    faults = driver("Compare", memories, family="", mode=number, count=64, **arguments)
    assert not faults, faults[0].text
    for after in (memories, model):
        assert ub(after, 8192, "uint8_t", 9).tolist() == [byte] * 8 + [0]


def test_select(driver):
    """The first bytes of the page's masks, 60 and 32: bits 2..5 and 13 take the first source."""
    memories = _memories(UB=np.arange(64, dtype=np.float32))
    memories.write("UB", 4096, -np.arange(64, dtype=np.float32))
    memories.write("UB", 8192, np.array([60, 32, 10, 7, 42, 52, 38, 26], np.uint8))
    arguments = {"dtype": "float", "mode": 2, "dst": Operand(16384), "bits_at": 8192, "src0": Operand(0)}
    arguments |= {"src1": Operand(4096), "mask": ("first", 64), "repeat": 1}
    for after in both(driver, "Select", vector.select, memories, extra={"family": ""}, **arguments):
        signs = np.sign(ub(after, 16384, "float", 16)).tolist()
        assert signs == [0, -1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("which", ["Max", "Min", "Sum"])
def test_block_reduce(driver, which):
    """A block of 16 halves gives one result: the extreme among ones, the sum 16, 32, 48."""
    source = np.ones(128, np.float16)
    if which == "Max":
        source[[10, 29, 115]] = 2, 3, 4
        want = [2, 3, 1, 1, 1, 1, 1, 4]
    elif which == "Min":
        source[:] = 10
        source[[11, 29, 121]] = 2, -3, 4
        want = [2, -3, 10, 10, 10, 10, 10, 4]
    else:
        source[:] = np.repeat([1, 2, 1, 1, 1, 1, 1, 3], 16)
        want = [16, 32, 16, 16, 16, 16, 16, 48]
    arguments = {"dtype": "half", "dst_at": 4096, "dst_repeat": 1, "src": Operand(0), "mask": ("first", 128)}
    arguments |= {"repeat": 1}

    def model(memories, **shape):
        reduce.block(memories, which, **shape)

    for after in both(driver, f"BlockReduce{which}", model, _memories(UB=source), extra={"family": ""}, **arguments):
        assert ub(after, 4096, "half", 8).tolist() == want


def test_pair_reduce(driver):
    source = np.tile(np.array([1, 1, 1, -1, 2, 2, -1, 2, 3, 3, 3, -1, 4, 4, -2, 4], np.float16), 8)
    arguments = {"dtype": "half", "dst_at": 4096, "dst_repeat": 1, "src": Operand(0), "mask": ("first", 128)}
    arguments |= {"repeat": 1}
    memories = _memories(UB=source)
    for after in both(driver, "PairReduceSum", reduce.pair_sum, memories, extra={"family": ""}, **arguments):
        assert ub(after, 4096, "half", 64).tolist() == [2, 0, 4, 1, 6, 2, 8, 2] * 8


def test_whole_reduce_index(driver):
    """The index comes in the bits of the operand's type; of equal values the first one counts."""
    source = np.zeros(512, np.float16)
    source[[114, 120]] = 0.9985
    arguments = {"dtype": "half", "dst_at": 4096, "dst_repeat": 1, "src": Operand(0), "mask": ("first", 128)}
    arguments |= {"repeat": 4}

    def model(memories, **shape):
        reduce.whole(memories, "Max", **shape)

    memories, extra = _memories(UB=source), {"family": "", "order": 0}
    for after in both(driver, "WholeReduceMax", model, memories, extra=extra, **arguments):
        assert ub(after, 4096, "half", 8)[::2].tolist() == [np.float16(0.9985), 0, 0, 0]
        assert ub(after, 4096, "uint16_t", 8)[1::2].tolist() == [114, 0, 0, 0]
