"""``tiling``: what the host tiling of the Ascend kernels plans for a shape: blocks, buffers, and who computes what.

It runs no kernel and needs no NPU: the tiling is the one that CANN would call, in the library of the host twin.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os

from . import library, op_table
from .direct import INPUTS, Call, with_inputs
from .shape import Shape

SOCS = ("910B1", "910B2", "910B3", "910B4")
DTYPES = {"fp16": "float16", "float16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16"}
OPS = ("fwd", "bwd", "bias_grad")
MEMORY = {"UB": 192 << 10, "L1": 512 << 10, "L0A": 64 << 10, "L0B": 64 << 10, "L0C": 128 << 10}
_ITEM = {"float16": "u2", "bfloat16": "u2", "float32": "f4", "bool": "u1"}


class TwinCall(Call):
    """A call of an op on the twin's library by shapes alone: no data, nothing computed.

    Args:
        shape (Shape): The sizes, in layout BNSD.
        op (str): "fwd", "bwd" or "bias_grad".
        dtype (str): "float16" or "bfloat16".
        window (tuple): (left, right), -1 for unlimited; causal is right 0.
        present (tuple): Names of inputs that are given beside query, key and value: attn_mask and bias.
        v_head_dim (int): Channels of the values; 0 for as many as keys have.
    """

    def __init__(self, shape, op="fwd", dtype="float16", window=(-1, -1), present=(), v_head_dim=0):
        query, key, value, out, rows, plane = (
            (shape.batch, shape.heads, shape.q_len, shape.head_dim),
            (shape.batch, shape.kv_heads, shape.kv_len, shape.head_dim),
            (shape.batch, shape.kv_heads, shape.kv_len, v_head_dim or shape.head_dim),
            (shape.batch, shape.heads, shape.q_len, v_head_dim or shape.head_dim),
            (shape.batch, shape.heads, shape.q_len), (1, 1, shape.q_len, shape.kv_len))
        arrays = with_inputs((query, dtype), (key, dtype), (value, dtype), **{
            name: (plane, "bool" if name == "attn_mask" else "float32") for name in present})
        statistics = [(rows, "float32")] * 2
        if op == "fwd":
            arrays += [(out, dtype), (rows, "float32"), *statistics]
        else:
            arrays += [(out, dtype), *statistics, (out, dtype), (rows, "float32")]
            arrays += [(plane, "float32")] if op == "bias_grad" else [
                (query, dtype), (key, dtype), (value, dtype), ((1,), "float32")]
        super().__init__(op, arrays, window)

    def plan(self) -> dict:
        """What the host tiling decides.

        Raises:
            ValueError: If the kernels do not take the problem.
        """
        native = library.ASCEND_TWIN.load()
        anything = ctypes.create_string_buffer(1)   # nobody reads it, but an input is there if its pointer is not null
        inputs = INPUTS if self.op == "fwd" else INPUTS + 5
        pointers = [ctypes.addressof(anything) if array else None for array in self.arrays[:inputs]]
        text = native.msflash_ascend_plan(*self.arguments(pointers + [None] * (len(self.arrays) - inputs)))
        if text is None:
            raise ValueError(native.msflash_ascend_last_error().decode())
        return json.loads(text)

    def report(self) -> dict:
        """Runs the kernel on the twin and returns what that says of it; after ``configure_twin(effects=0)`` nothing is
        computed but the cycles.

        Raises:
            ValueError: If the kernels do not take the problem.
        """
        import numpy as np

        native = library.ASCEND_TWIN.load()
        memory = [array and np.zeros(array[0], _ITEM[array[1]]) for array in self.arrays]   # touched only if used
        if native.msflash_ascend_call(*self.arguments([None if x is None else x.ctypes.data for x in memory])):
            raise ValueError(native.msflash_ascend_last_error().decode())
        return json.loads(native.msflash_ascend_last_report())


def tile_cycles(name: str) -> tuple[float, float]:
    """Cycles that one more tile of 128 x 256 with D = 128 takes on the twin, at the fast and the slow end of the costs:
    "qk", "softmax", "pv" or "rescale", the steps of a forward pass, each alone."""
    native = library.ASCEND_TWIN.load()
    ends = []
    for tiles in (8, 24):
        cycles = (ctypes.c_double * 2)()
        assert native.msflash_ascend_tile(name.encode(), ctypes.c_int64(tiles), cycles) == 0
        ends.append(cycles[:])
    return tuple((many - few) / 16 for few, many in zip(*ends))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--shape", type=_shape, required=True, metavar="B,N,Nk,Sq,Sk,D[,Dv]",
                        help="batch, heads, heads of key and value, lengths of query and of key, head_dim (of value)")
    parser.add_argument("--causal", action="store_true", help="query i sees keys up to i + Sk - Sq")
    parser.add_argument("--window", type=_window, default=(-1, -1), metavar="LEFT,RIGHT",
                        help="keys to the left and right of the diagonal that are seen, -1: all")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="default: %(default)s")
    parser.add_argument("--soc", choices=SOCS, default="910B3", help="default: %(default)s")
    parser.add_argument("--op", choices=OPS, default="fwd", help="forward, backward or the gradient of bias")
    parser.add_argument("--presets", metavar="FILE", help="block sizes (default: MS_FLASH_PRESETS, else those of "
                                                          "op_impl/ascendc/presets.yaml)")
    parser.add_argument("--json", action="store_true", help="print the plan as it is")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 2 for a problem that the kernels do not take."""
    presets = args.presets or os.environ.get("MS_FLASH_PRESETS") or op_table.path().parent / "ascendc" / "presets.yaml"
    os.environ["MS_FLASH_PRESETS"] = str(presets) if os.path.exists(presets) or args.presets else ""
    left, right = args.window
    try:
        library.configure_twin(soc=args.soc, cores=0)
        present = ("bias",) if args.op == "bias_grad" else ()
        window = (left, 0 if args.causal else right)
        shape, v_head_dim = args.shape
        plan = TwinCall(shape, args.op, DTYPES[args.dtype], window, present, v_head_dim).plan()
    except ValueError as error:
        print(error)
        return 2
    print(json.dumps(plan) if args.json else as_text(args, plan))
    return 0


def as_text(args: argparse.Namespace, plan: dict) -> str:
    """The plan for people."""
    shape, v_head_dim = args.shape
    mask = "causal" if args.causal else "full" if args.window == (-1, -1) else f"window {args.window}"
    lines = [f"{args.op} of B={shape.batch} N={shape.heads} Nk={shape.kv_heads} Sq={shape.q_len} Sk={shape.kv_len} "
             f"D={shape.head_dim} Dv={v_head_dim}, {mask}, {DTYPES[args.dtype]}, Ascend {args.soc}", ""]
    blocks = {"query rows per block": plan.get("block_m", plan.get("block_q")),
              "keys per stack": plan.get("stack_n", plan.get("block_k")),
              "keys per product": plan.get("block_n"), "heads in one tile": plan.get("pack"),
              "stacks the cube runs ahead": plan["depth"], "accumulators of dQ": plan.get("parts"),
              "pieces of work": len(plan["core_of"]) or f"{len(plan['items'])} x {plan.get('heads_per_item', 1)}",
              "rows merged from parts": len(plan.get("merges", ())), "cores": plan["cores"],
              "tiling buffer": f"{plan['tiling_bytes']:,} bytes", "workspace": f"{plan['workspace']:,} bytes",
              "imbalance (busiest core over mean)": f"{plan['imbalance']:.1%}"}
    lines += [f"{name:<36}{value}" for name, value in blocks.items() if value is not None]
    lines += ["", *budget(plan), "", *picture(shape, args, plan)]
    return "\n".join(lines)


def budget(plan: dict) -> list[str]:
    """The buffers as a table, and what is left of each memory."""
    rows = [("memory", "buffer", "bytes", "share")]
    for memory, buffers in plan["buffers"].items():
        size = MEMORY[memory]
        rows += [(memory, name, f"{used:,}", f"{used / size:.1%}") for name, used in buffers.items()]
        left = size - sum(buffers.values())
        rows.append((memory, "free", f"{left:,}", f"{left / size:.1%}"))
    rows += [("workspace", name, f"{used:,}", "") for name, used in plan.get("workspaces", {}).items()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = [f"| {row[0]:<{widths[0]}} | {row[1]:<{widths[1]}} | {row[2]:>{widths[2]}} | {row[3]:>{widths[3]}} |"
             for row in rows]
    return [table[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *table[1:]]


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def picture(shape: Shape, args: argparse.Namespace, plan: dict, wide: int = 64, high: int = 32) -> list[str]:
    """Which core does what, for the first head of the first sequence: a letter is a core, a dot is work that nobody
    does; then what each core has to do in all."""
    rows, columns = min(high, -(-shape.q_len // 16)), min(wide, -(-shape.kv_len // 16))
    grid = [["."] * columns for _ in range(rows)]
    heads = plan.get("heads_per_item", 1)

    def paint(core, row0, row1, key0, key1):
        for r in range(row0 * rows // shape.q_len, -(-row1 * rows // shape.q_len)):
            for c in range(key0 * columns // shape.kv_len, -(-key1 * columns // shape.kv_len)):
                grid[r][c] = _LETTERS[core % 26]

    if args.op == "fwd":
        for index, (batch, row0, count, key0, key1, _) in enumerate(plan["items"]):
            if batch == 0 and key1 > key0 and plan["core_of"]:
                paint(plan["core_of"][index * heads], row0, row0 + count, key0, key1)
    else:
        for core, batch, head, row0, count, key0, keys, _ in plan["pairs"]:
            if batch == 0 and head == 0:
                paint(core, row0, row0 + count, key0, key0 + keys)
    lines = ["first head of the first sequence: queries down, keys to the right; a letter is a core, '.' is skipped"]
    lines += ["  " + "".join(row) for row in grid]
    costs = plan["cost_per_core"]
    most = max([*costs, 1e-9])
    lines += ["", "work of each core, in products of 16 x 16 x 16"]
    lines += [f"  {_LETTERS[core % 26]} {cost:>12,.0f} {'#' * round(40 * cost / most)}"
              for core, cost in enumerate(costs)]
    return lines


def _shape(text):
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"must be six or seven positive numbers, but got {text!r}")
    return Shape(text, *sizes[:6]), sizes[-1]


def _window(text):
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers, but got {text!r}") from None
    return left, right
