"""Runs of a worker, each in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys


class Runs:
    """How long and how often things run, and a way to run them."""

    def __init__(self, args: argparse.Namespace, progress):
        self.seconds, self.rounds = (args.seconds or 1.0, 3) if args.quick else (args.seconds or 3.0, 5)
        self.progress = progress

    def measure(self, what, case, dtype, variants, implementations, threads):
        """Runs a worker and yields its result for each variant; where it died, the reason stands for all of them."""
        request = {"what": what, "case": dataclasses.asdict(case), "dtype": dtype, "variants": variants,
                   "threads": threads, "implementations": implementations, "seconds": self.seconds,
                   "rounds": self.rounds}
        self.progress.show(f"{what} {case.name} {dtype} {threads} threads")
        command = [sys.executable, "-m", "ms_flash.bench.worker", json.dumps(request)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
            left = len(variants)
            for line in worker.stdout:
                if line.startswith("RESULT "):
                    left -= 1
                    self.progress.step()
                    yield json.loads(line[len("RESULT "):])
            reason = worker.stderr.read().strip().splitlines()[-1:] or ["no message"]
        for _ in range(left):
            self.progress.step()
            yield dict.fromkeys(implementations, f"the process ended with {worker.returncode}: {reason[0][:100]}")
