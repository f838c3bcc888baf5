"""Benchmark of ext_proc through a real Envoy: the CPU of a decision, and the latency it adds.

python benchmarks/extproc.py [--quick] [--rounds N] [--workers N] [--json FILE]
"""

import sys
from pathlib import Path

# This script's own name would hide the package that it measures.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from extproc_rounds import main

if __name__ == "__main__":
    main()
