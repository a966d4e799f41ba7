"""Figures of one model shape on a GPU: workloads by name at several depths, as a table and as JSON.

    python benchmarks/gpu_figures.py --shape llama-8b --workloads long,mid,one,wide --depths 1,2,3 --out figures.json

A thin caller of ``gapless bench``; every other option goes there.
"""

from __future__ import annotations

import argparse
import sys

from gapless.cli import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workloads", default="long,mid,one,wide")
    parser.add_argument("--depths", default="2")
    parser.add_argument("--out")
    known, rest = parser.parse_known_args()
    save = ["--save", known.out] if known.out else []
    sys.exit(main(["bench", *known.workloads.split(","), "--depth", known.depths, *save, *rest]))
