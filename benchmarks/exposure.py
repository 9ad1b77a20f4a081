"""`python benchmarks/exposure.py data/exposure.csv`: who is affected, over releases and configurations."""

import sys
from pathlib import Path

from specmortem.affected.matrix import as_csv

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_csv(), encoding="utf-8")
