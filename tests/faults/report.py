"""`python -m tests.faults.report`: every fault, kill and crash of every command, and a table of their numbers."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.harness import Trial, Workshop
from tests.faults.scenarios import SCENARIOS, Preparation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="*", help="names of scenarios; default: all")
    parser.add_argument("--every", type=int, default=1, help="only every N-th case")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    chosen = parser.parse_args()
    print("| command | calls | failed | killed | crashed | states | problems | seconds |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    total = 0
    with tempfile.TemporaryDirectory() as folder, Workshop(Path(folder)) as shop:
        preparation = Preparation(shop)
        for scenario in SCENARIOS:
            if chosen.scenario and scenario.name not in chosen.scenario:
                continue
            began = time.monotonic()
            trial = Trial(shop, scenario, preparation.disk(scenario.needs))
            problems = trial.problems(every=chosen.every, first=chosen.first)
            counts = [trial.counts[name] for name in ("faults", "kills", "crashes", "states")]
            row = [scenario.name, len(trial.trace), *counts, len(problems), round(time.monotonic() - began)]
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            for problem in problems:
                print(f"  {problem}", file=sys.stderr, flush=True)
            total += len(problems)
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
