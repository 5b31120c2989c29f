"""`tformer viz-tokens`: a text coloured by the loss of each token, the hardest tokens of data, calibration."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit_document, progress_reporter, show_notes
from tformer.inside.options import TokenOptions
from tformer.support.files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.inside.tokens import TokenReport

EPILOG = examples(
    '`tformer viz-tokens --text "The cat sat on the mat." -o tokens.html`',
    '`tformer viz-tokens runs/a runs/b --text "The cat sat." -o both.html`',
    '`tformer viz-tokens --text "The cat sat." --format terminal`',
    "`tformer viz-tokens runs/first --data book.txt --hardest 50 -o hardest.csv`",
    '`tformer viz-tokens runs/translator --text "ein Hund" --target "a dog" -o pair.svg`',
)


@takes_options
def viz_tokens(options: TokenOptions) -> None:
    """Colour a text by the loss of each token.

    Each token has its loss in bits (-log2 of its probability), its rank, and the tokens that the model found more
    probable, which the page shows at the cursor. RUN2 is shown beside RUN, aligned by characters where the tokenizers
    differ. Encoder-decoders predict the target, masked language models each token alone masked. Without --text the
    model reads --data, and the hardest tokens are listed. The calibration compares probabilities with the share of
    predictions that are right.
    """
    options.check()
    from tformer.viz.output import choose_output

    chosen = choose_output(options.output, options.format, stem="tokens")
    files = (options.data, options.source, options.target) if options.text is None else ()
    refuse_to_replace(chosen.path, [name for name in files if name is not None], option="-o")
    with StopFlag() as flag:
        from tformer.inside.tokens import HEADS
        from tformer.loading import load
        from tformer.support.device import resolve_device
        from tformer.viz.tokens import render, summary_line
        from tformer.workers.work import Work
        from tformer.workflows.tokens import score_tokens

        work = Work(progress_reporter, flag.should_stop, lambda text: show_notes([text], dim=True))
        device = resolve_device(options.device)
        reports: list[TokenReport] = []
        for run in (options.run, *([] if options.second is None else [options.second])):
            loaded = load(run, device=device, which=options.checkpoint, kinds=HEADS)
            show_notes((f"model: {loaded.path}", *loaded.notes), dim=True)
            report = score_tokens(loaded, options, work)
            if report.source is not None:  # a second model reads the translation of the first
                options = replace(options, target=report.text)
            show_notes((*report.notes, f"read: {report.read}", summary_line(report)), dim=True)
            reports.append(report)
    command = shlex.join(["tformer", *sys.argv[1:]])
    to_file = chosen.path is not None
    emit_document(chosen, render(reports, chosen.format, hardest=options.hardest, command=command, to_file=to_file))
