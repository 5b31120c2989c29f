"""`tformer patch`: activation patching between two prompts, and ablation of heads and layers."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import PatchOptions
from tformer.support.formatting import fitted

SHOWN = 160  # characters of a prompt above the maps

EPILOG = examples(
    '`tformer patch --clean "The Louvre is in" --corrupted "The Prado is in"`',
    "`tformer patch --clean Kx7QbmK --corrupted Qx7KbmK -o circuit.svg`",
    "`tformer patch runs/induction --ablate zero --format terminal`",
    "`tformer patch runs/first --ablate mean --data book.txt -o worth.html`",
)


@takes_options
def patch(options: PatchOptions) -> None:
    """Find the parts that an answer needs: patching, ablation.

    Every layer and position of the residual stream, of attention and of feed-forward outputs, and every head, is taken
    from the run on --clean into the run on --corrupted. A cell of 1 restores the answer to --clean, 0 changes nothing.
    Attribution patching estimates all cells by gradients; its correlation with them is shown. --ablate measures on
    --data how much loss each head, attention and feed-forward network saves.
    """
    images = (options.clean_image, options.corrupted_image)
    reads = images if options.ablate is None else options.files
    with looking_inside(options, "patch", reads) as (chosen, loaded, work):
        from tformer.viz import patching as viz
        from tformer.workflows.patching import ablate, patch_prompts

        if options.ablate is None:
            report = patch_prompts(loaded, options, work)
            show_notes(viz.patch_lines(report), dim=True)
            clean, corrupted = (fitted(str(each.image or each.text), SHOWN) for each in options.prompts)
            about = f"clean: {clean} · corrupted: {corrupted} · {viz.metric_words(report)}"
            emit_view(chosen, loaded, viz.patch_view(report, loaded.identity, about))
        else:
            found = ablate(loaded, options, work)
            show_notes([f"measured on {found.data}"], dim=True)
            emit_view(chosen, loaded, viz.ablation_view(found, loaded.identity))
