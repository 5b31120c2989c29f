"""`tformer viz-tokens`: a text coloured by the loss of each token, the hardest tokens of data, calibration."""

from __future__ import annotations

from dataclasses import replace

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import TOKEN_HEADS, TokenOptions

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
    reads = options.files if options.text is None else ()
    with looking_inside(options, "tokens", reads, kinds=TOKEN_HEADS) as (chosen, loaded, work):
        from tformer.viz.tokens import summary_line, view_of
        from tformer.workflows.tokens import score_tokens

        reports = [score_tokens(loaded, options, work)]
        if options.second is not None:
            from tformer.loading import load

            device = next(loaded.model.parameters()).device
            other = load(options.second, device=device, which=options.checkpoint, kinds=TOKEN_HEADS)
            show_notes((f"model: {other.path}", *other.notes), dim=True)
            # Both read the translation of the first.
            target = options.target if reports[0].source is None else reports[0].text
            reports.append(score_tokens(other, replace(options, target=target), work))
    for report in reports:
        show_notes((*report.notes, f"read: {report.read}", summary_line(report)), dim=True)
    emit_view(chosen, loaded, view_of(reports, hardest=options.hardest, command=command_line()))
