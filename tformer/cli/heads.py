"""`tformer heads`: scores of attention heads, of one checkpoint or over a training."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import HeadOptions

EPILOG = examples(
    "`tformer heads`",
    "`tformer heads runs/first --format terminal`",
    "`tformer heads runs/induction --over-training -o birth.html`",
    "`tformer heads runs/first --data book.txt -o heads.svg`",
    "`tformer heads runs/translator --source test.en --target test.de -o alignment.html`",
)


@takes_options
def heads(options: HeadOptions) -> None:
    """Score attention heads: induction, previous token, alignment.

    The model reads random tokens that repeat, or --data. A score is the mean attention to the token before, to the
    first token, to other places of the same token, or to the tokens that came after those (induction). An
    encoder-decoder reads pairs; sharpness and coverage of its cross-attention show which heads align. With
    --over-training the page shows in which steps heads of a kind appear: tformer train --arch gpt --preset induction
    trains a model for it.
    """
    with looking_inside(options, "heads", options.files) as (chosen, loaded, work):
        from tformer.viz import heads as viz
        from tformer.workflows.heads import score_heads

        reports = score_heads(loaded, options, work)
    show_notes((f"read: {reports[-1].read}", *viz.best_lines(reports[-1])), dim=True)
    emit_view(chosen, loaded, viz.view_of(reports, loaded.identity))
