"""`tformer attribute`: how much each token or patch of the input mattered for an answer."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import ANSWERING_HEADS, AttributeOptions

EPILOG = examples(
    '`tformer attribute --text "The cat sat on the" -o attribute.html`',
    '`tformer attribute --text "The keys are" --target-token " are" --against " is"`',
    '`tformer attribute runs/translator --text "Ein Hund." -o hund.html`',
    "`tformer attribute runs/vit-mnist-1 --image three.png --methods integrated,occlusion -o three.svg`",
)


@takes_options
def attribute(options: AttributeOptions) -> None:
    """Show which token or patch mattered for an answer.

    Gradient x input, integrated gradients, occlusion and attention rollout side by side: of a language model for the
    next token or for those of --max-new-tokens, of a translator for each token of the target (by source and target),
    of a masked language model for every [MASK], of a classifier or regression for its label or score. Integrated
    gradients add up to the change from a baseline without the text; the gap that --steps leave is shown.
    """
    with looking_inside(options, "attribute", [options.image], kinds=ANSWERING_HEADS) as (chosen, loaded, work):
        from tformer.viz.attribution import attribution_lines, view_of
        from tformer.workflows.attribution import attribute_inputs

        report = attribute_inputs(loaded, options, work)
    show_notes((*report.notes, *attribution_lines(report)), dim=True)
    emit_view(chosen, loaded, view_of(report, loaded.identity))
