"""`tformer lens`: the answer after each layer, and the parts of a logit, as a page, a picture, text or numbers."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import LENS_HEADS, LensOptions
from tformer.support.errors import InputError

EPILOG = examples(
    '`tformer lens --text "The cat sat on the mat." -o lens.html`',
    '`tformer lens --text "The cat sat" --target-token " on" --format terminal`',
    '`tformer lens --text "The cat sat" --tuned book.txt -o tuned.html`',
    '`tformer lens --text "The keys are" --target-token " are" --against " is" --view parts -o parts.svg`',
    "`tformer lens runs/vit-mnist-1 --image three.png --format csv`",
)


@takes_options
def lens(options: LensOptions) -> None:
    """Show the answer after each layer, and what adds to a logit.

    The logit lens of language models: for each position the most probable tokens, with probability and rank of the
    token that comes next, entropy, and KL(model's answer ‖ answer after the layer); masked language models at each
    [MASK]; classifiers: the labels. Logits are divided into embedding, positions, every attention head, biases and
    feed-forwards, which add up to the logit. The page (default) has both. --tuned trains a tuned lens (decoder-only
    language models), which --lens tuned then reads.
    """
    reads = (options.image, options.tuned)
    with looking_inside(options, "lens", reads, kinds=LENS_HEADS) as (chosen, loaded, work):
        from tformer.viz.lens.page import view_of
        from tformer.workflows.lens import make_report

        report = make_report(loaded, options, work=work, command=command_line())
    show_notes(report.notes, dim=True)
    if options.view == "parts" and report.parts is None:
        raise InputError(f"--view parts: {report.without_parts}")
    emit_view(chosen, loaded, view_of(report, options.view))
