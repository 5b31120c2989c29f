"""All races of the guide's tables (results.md, "Speed"), and one report of them:

    python -m tests.benchmarks.all_cases [--quick] [--device cpu] [--out report.md]

Libraries that are not installed are left out; what cannot be measured is reported as such. It writes the JSON document
of each case too, as `report.md` and `report-1.json`; `tests.benchmarks.chart` draws the README's chart from these.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import date
from pathlib import Path

from tests.benchmarks.race import FAIRNESS, prepare
from tformer.bench.report import ReportTable, best_rows, bullets, markdown, peak_bytes, ratios
from tformer.cli.process import StopFlag
from tformer.support import __version__
from tformer.support.device import resolve_device
from tformer.support.errors import TformerError
from tformer.support.files import write_text
from tformer.support.formatting import binary_bytes, json_text, ratio

NO_DROPOUT = " ".join(
    f"--set model.{key}=0" for key in ("embedding.dropout", "decoder.dropout", "decoder.attention_dropout")
)  # as nanoGPT's own bench has it
SMALL = "--arch gpt --preset small"
WRITING = f"generate {SMALL} --prompt-length 16 --new-tokens 128 --precision bf16 --quantize none,int8,int4"
BASE = "translate --arch transformer --preset base --set model.vocab_size=16000"
PEERS = "--peer transformers"

CPU_CASES = {
    "Training, 6 layers of width 384 (nanoGPT's baby shape)": (
        f"train --arch gpt --preset char {NO_DROPOUT} --batch-size 16 --length 256 {PEERS}"
    ),
    "Training, GPT-2 of 124M": f"train {SMALL} --batch-size 2 --length 512 --repeats 5 {PEERS}",
    "Generation, GPT-2 of 124M, one text": f"{WRITING} --batch-size 1 {PEERS} --peer llama.cpp",
    "Generation, GPT-2 of 124M, eight texts": f"{WRITING} --batch-size 8 {PEERS} --peer llama.cpp",
    "Translation, 6 + 6 layers of width 512, beam 4": (
        f"{BASE} --batch-size 32,64 --source-length 20 --quantize none,int8 --repeats 5 --peer ctranslate2 {PEERS}"
    ),
    "Classification of 10,000 short texts, 4 layers of width 512": (
        f"classify --arch bert --preset small --batch-size 16,32,64 --repeats 3 --max-seconds 1800 {PEERS}"
    ),
}
GPU_CASES = {
    f"Training, GPT-2 of {size}": (
        f"train --arch gpt --preset {preset} --batch-size {sizes} --length 1024 --compile {peers}"
    )
    for size, preset, sizes, peers in (
        ("124M", "small", "16,32,64", PEERS),
        ("350M", "medium", "8,16,32", PEERS),
        ("1.5B", "xl", "4,8,16", ""),
    )
} | {
    f"Generation, GPT-2 of {size}, one text": f"generate --arch gpt --preset {preset} --precision bf16 {PEERS}"
    for size, preset in (("124M", "small"), ("1.5B", "xl"))
}
QUICK = "--repeats 3 --max-seconds 300"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("report.md"))
    asked = parser.parse_args()
    device = resolve_device(asked.device)
    cases = CPU_CASES if device.type == "cpu" else GPU_CASES
    more = ["--device", str(device), *(shlex.split(QUICK) if asked.quick else [])]
    sections, summary, line = [], [], ""
    with StopFlag() as flag:
        for number, (title, words) in enumerate(cases.items(), start=1):
            print(f"{number} of {len(cases)}  {title}: {words}", file=sys.stderr)
            try:
                race = prepare([*shlex.split(words), *more], may_lack=True)
            except TformerError as error:
                sections.append(f"## {title}\n\nnot measured: {error.message}")
                continue
            rows = race.run(lambda line: print(f"  {line}", file=sys.stderr), flag.should_stop)
            write_text(asked.out.with_name(f"{asked.out.stem}-{number}.json"), json_text(race.document(rows)))
            sections.append("\n\n".join([f"## {title}", bullets(race.notes), race.markdown(rows)]))
            line, best = race.line, best_rows(rows)
            summary += [
                (
                    f"{title}: {row.entry.precision}, batch {row.batch_size}",
                    f"{row.tokens_per_second:,.0f}",
                    "" if row.share_of_peak is None else f"{row.share_of_peak:.0%}",
                    binary_bytes(peak_bytes(row)),
                    ", ".join(f"{label} {ratio(times)}" for label, times in ratios(row, best).items()),
                )
                for row in best
                if row.is_ours
            ]
    headings = ("", "tokens/s", "share of peak", "peak memory", "times as fast as")
    best_of_each = markdown(ReportTable("The best batch size of each:", headings, tuple(summary)))
    head = f"# Speed of tformer {__version__}\n\n{date.today().isoformat()}. Machine: {line}.\n\n{FAIRNESS}"
    write_text(asked.out, "\n\n".join([head, best_of_each, *sections]) + "\n")
    print(asked.out)


if __name__ == "__main__":
    main()
