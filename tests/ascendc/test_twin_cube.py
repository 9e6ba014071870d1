"""L1 -> L0, Mmad and Fixpipe of the host twin against the numpy model, on random legal parameters."""

from __future__ import annotations

import numpy as np
from ascendc.compare import differences
from ascendc.draws import GM_BYTES, random_bytes
from ascendc.model import cube
from ascendc.model.memory import BLOCK, DTYPES, FRACTAL, SIZES, Memories

CASES = 1000


def _choice(rng, *values):
    return values[int(rng.integers(len(values)))]


def check(driver, op, memories, expected, **arguments):
    faults = driver(op, memories, core="AIC", **arguments)
    assert not faults, f"{op} {arguments}: {faults[0].text}"
    wrong = differences(memories, expected)
    assert not wrong, f"{op} {arguments}: {wrong}"


def test_load_data(driver):
    """Fractals from L1 to L0A and L0B, apart, repeated, transposed."""
    rng = np.random.default_rng()
    done = 0
    while done < CASES:
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int8_t")
        target = _choice(rng, "L0A", "L0B")
        shape = {
            "dtype": dtype,
            "dst": target,
            "dst_at": FRACTAL * int(rng.integers(0, 100)),
            "src_at": BLOCK * int(rng.integers(0, 4000)),
            "start_index": int(rng.integers(0, 60)),
            "repeat": int(rng.integers(1, 100)),
            "src_stride": int(rng.integers(0, 12)),
            "dst_gap": _choice(rng, 0, 0, 1, 3),
            "transpose": DTYPES[dtype].itemsize == 2 and rng.random() < 0.5,
        }
        if shape["dst_at"] + shape["repeat"] * (1 + shape["dst_gap"]) * FRACTAL > SIZES[target]:
            continue
        if shape["src_at"] + (shape["start_index"] + shape["repeat"] * shape["src_stride"] + 1) * FRACTAL > SIZES["L1"]:
            continue
        memories = random_bytes(rng, "L1", target, gm=64)
        expected = memories.copy()
        cube.load_data(expected, **shape)
        check(driver, "LoadData", memories, expected, **shape)
        done += 1


def test_load_data_with_transpose(driver):
    """Squares of 16x16 and 32x32 elements, transposed and cut into fractals."""
    rng = np.random.default_rng()
    done = 0
    while done < CASES:
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int8_t")
        target = _choice(rng, "L0A", "L0B")
        parts = 1 if DTYPES[dtype].itemsize == 2 else 2
        frac_gap, dst_gap, repeat = 0, _choice(rng, 0, 1, 4), int(rng.integers(1, 50))
        if parts == 2:  # the second fractals go between the first ones, or behind all of them
            dst_gap, frac_gap = _choice(rng, (1, 0), (3, 1), (4, 0), (0, repeat - 1), (0, repeat + 2))
        shape = {
            "dtype": dtype,
            "dst": target,
            "dst_at": FRACTAL * int(rng.integers(0, 20)),
            "src_at": BLOCK * int(rng.integers(0, 2000)),
            "start_index": int(rng.integers(0, 30)),
            "repeat": repeat,
            "src_stride": int(rng.integers(0, 6)),
            "dst_gap": dst_gap,
            "frac_gap": frac_gap,
        }
        if shape["dst_at"] + (repeat * (1 + dst_gap) + parts * (1 + frac_gap)) * FRACTAL > SIZES[target]:
            continue
        if shape["src_at"] + (shape["start_index"] + repeat * shape["src_stride"] + 1) * 2 * FRACTAL > SIZES["L1"]:
            continue
        memories = random_bytes(rng, "L1", target, gm=64)
        expected = memories.copy()
        cube.load_transposed(expected, **shape)
        check(driver, "LoadDataWithTranspose", memories, expected, **shape)
        done += 1


def _product(rng, dtype, whole):
    """Arguments of a Mmad and the memories for it. `whole`: small integers, whose sums are exact in any order."""
    kind = DTYPES[dtype]
    width = BLOCK // kind.itemsize
    while True:
        m, n, k = (int(rng.integers(1, 120)) for _ in range(3))
        m = 1 if rng.random() < 0.15 else m
        rows, cols, depth = -(-m // 16), -(-n // 16), -(-k // width)
        bytes_a, bytes_b, bytes_c = rows * depth * FRACTAL, depth * cols * FRACTAL, rows * cols * 1024
        if bytes_a <= SIZES["L0A"] and bytes_b <= SIZES["L0B"] and bytes_c <= SIZES["L0C"]:
            break
    low, high = (-4, 5) if whole else (-2.0, 2.0)
    draw = rng.integers if whole else rng.uniform
    out = np.int32 if dtype == "int8_t" else np.float32
    memories = Memories(gm=np.zeros(64, np.uint8))
    for name, element in (("L0A", kind), ("L0B", kind), ("L0C", np.dtype(out)), ("BT", np.dtype(out))):
        values = draw(low, high, SIZES[name] // element.itemsize).astype(element)
        memories[name] = values.view(np.uint8)
    shape = {
        "dtype": dtype,
        "c_at": 1024 * int(rng.integers(0, (SIZES["L0C"] - bytes_c) // 1024 + 1)),
        "a_at": FRACTAL * int(rng.integers(0, (SIZES["L0A"] - bytes_a) // FRACTAL + 1)),
        "b_at": FRACTAL * int(rng.integers(0, (SIZES["L0B"] - bytes_b) // FRACTAL + 1)),
        "m": m,
        "n": n,
        "k": k,
        "init": rng.random() < 0.5,
    }
    if rng.random() < 0.2:
        shape["bias_at"] = 64 * int(rng.integers(0, (SIZES["BT"] - cols * 64) // 64 + 1))
    return memories, shape


def _outside(shape):
    """Bytes of L0C beside the m x n results within their fractals: the manual leaves them open."""
    where = cube.c_addresses(shape["c_at"], -(-shape["m"] // 16) * 16, -(-shape["n"] // 16) * 16)
    return where.reshape(-1)


def test_mmad_exact(driver):
    """Small integers: layout, edges, start value, bias, to the bit, in every type."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        memories, shape = _product(rng, _choice(rng, "half", "bfloat16_t", "float", "int8_t"), whole=True)
        expected = memories.copy()
        inside, _ = cube.mmad(expected, **shape)
        faults = driver("Mmad", memories, core="AIC", **shape)
        assert not faults, f"{shape}: {faults[0].text}"
        padding = np.setdiff1d(_outside(shape), inside.reshape(-1))[:, None] + np.arange(4)
        expected["L0C"][padding] = memories["L0C"][padding]
        wrong = differences(memories, expected)
        assert not wrong, f"{shape}: {wrong}"


def test_mmad_real(driver):
    """Real numbers: within the bound of any order of float32 additions."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        memories, shape = _product(rng, _choice(rng, "half", "bfloat16_t", "float"), whole=False)
        expected = memories.copy()
        where, size = cube.mmad(expected, **shape)
        faults = driver("Mmad", memories, core="AIC", **shape)
        assert not faults, f"{shape}: {faults[0].text}"
        got, want = (x.gather("L0C", where, np.dtype(np.float32)).astype(np.float64) for x in (memories, expected))
        error = np.abs(got - want) / (size * 2.0**-24 * (shape["k"] + 1))
        assert error.max() <= 1, f"{shape}: {error.max():.2f} times the bound"


def test_fixpipe(driver):
    """L0C -> GM by rows and by strips, and -> L1, in every type; several matrices; relu."""
    rng = np.random.default_rng()
    done = 0
    while done < CASES:
        dtype = _choice(rng, "float", "float", "float", "int32_t")
        to = "int32_t" if dtype == "int32_t" else _choice(rng, "float", "half", "bfloat16_t")
        nz = rng.random() < 0.4
        target = "L1" if nz and to in ("half", "bfloat16_t") and rng.random() < 0.4 else "gm"
        size = DTYPES[to].itemsize
        m = int(rng.integers(1, 130))
        n = 16 * int(rng.integers(1, 9)) if nz else int(rng.integers(1, 140))
        src_stride = -(-m // 16) * 16 + 16 * _choice(rng, 0, 0, 1)
        strips = -(-n // 16)
        matrices = int(rng.integers(2, 4)) if not nz and rng.random() < 0.25 else 1
        # The next matrix of L0C behind this one, in units of 16x16 elements.
        src_matrix = strips * src_stride // 16 if matrices > 1 else 0
        if nz:
            dst_stride = (m + int(rng.integers(0, 9))) * 16 * size // BLOCK
            bytes_out = strips * dst_stride * BLOCK
            dst_matrix = 0
        else:
            dst_stride = n + int(rng.integers(0, 30))
            dst_matrix = m * dst_stride + int(rng.integers(0, 30)) if matrices > 1 else 0
            bytes_out = (matrices * max(dst_matrix, m * dst_stride)) * size
        bytes_in = max(matrices * src_matrix * 1024, strips * src_stride * 64)
        room = SIZES["L1"] if target == "L1" else GM_BYTES
        if bytes_in > SIZES["L0C"] or bytes_out > room or dst_matrix > 65535 or src_matrix > 512:
            continue
        align = BLOCK if nz else size
        shape = {
            "dtype": dtype,
            "to": to,
            "dst": target,
            "dst_at": align * int(rng.integers(0, (room - bytes_out) // align + 1)),
            "src_at": 64 * int(rng.integers(0, (SIZES["L0C"] - bytes_in) // 64 + 1)),
            "n_size": n,
            "m_size": m,
            "src_stride": src_stride,
            "dst_stride": dst_stride,
            "nz": nz,
            "relu": rng.random() < 0.2,
            "nd": (matrices, src_matrix, dst_matrix),
        }
        memories = random_bytes(rng, *{"L0C", target} - {"gm"})
        kind = DTYPES[dtype]
        count = SIZES["L0C"] // 4
        values = rng.integers(-(1 << 30), 1 << 30, count) if kind.kind == "i" else rng.uniform(-100, 100, count)
        memories["L0C"] = values.astype(kind).view(np.uint8)
        expected = memories.copy()
        cube.fixpipe(expected, **shape)
        check(driver, "Fixpipe", memories, expected, **shape)
        done += 1
