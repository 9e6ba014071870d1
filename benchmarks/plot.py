"""Charts of a CSV that ``python -m ms_flash bench`` wrote: see ms_flash/bench/plots.py.

python benchmarks/plot.py build/bench/cpu.csv [--dtype float32] [--out build/bench]
"""

import argparse
from pathlib import Path

from ms_flash.bench import plots

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="folder of the charts (default: that of the CSV)")
    arguments = parser.parse_args()
    for path in plots.draw(arguments.csv, arguments.dtype, arguments.out or arguments.csv.parent):
        print(path)
