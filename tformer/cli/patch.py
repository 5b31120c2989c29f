"""`tformer patch`: activation patching between two prompts, and ablation of heads and layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, looking_inside
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import PatchOptions
from tformer.support.formatting import aligned

if TYPE_CHECKING:
    from tformer.inside.patching import AblationReport, PatchReport
    from tformer.loading import Loaded
    from tformer.viz.output import Output

EPILOG = examples(
    '`tformer patch --clean "The Louvre is in" --corrupted "The Prado is in"`',
    "`tformer patch --clean Kx7QbmK --corrupted Qx7KbmK -o circuit.svg`",
    "`tformer patch runs/induction --ablate zero --format terminal`",
    "`tformer patch runs/first --ablate mean --data book.txt -o worth.html`",
)


@takes_options
def patch(options: PatchOptions) -> None:
    """Find the parts that an answer depends on: patch activations between two prompts, or ablate.

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

        report: PatchReport | AblationReport
        if options.ablate is None:
            report = patch_prompts(loaded, options, work)
            show_notes(viz.patch_lines(report), dim=True)
        else:
            report = ablate(loaded, options, work)
            show_notes([f"measured on {report.data}"], dim=True)
    emit_document(chosen, _content(report, chosen, loaded))


def _content(report: PatchReport | AblationReport, chosen: Output, loaded: Loaded) -> str | bytes:
    from tformer.inside.patching import PatchReport
    from tformer.viz import patching as viz
    from tformer.viz.attention.scene import run_name
    from tformer.viz.picture import render_plots

    name, notes = run_name(loaded.path), (f"Model: {loaded.path}.", f"Command: {command_line()}")
    if isinstance(report, PatchReport):
        if chosen.format in ("json", "csv"):
            return viz.patch_json(report, model=loaded.identity) if chosen.format == "json" else viz.patch_csv(report)
        plots, title = viz.patch_plots(report), f"{'Noising' if report.noising else 'Denoising'} of {name}"
    else:
        if chosen.format in ("json", "csv"):
            return (
                viz.ablation_json(report, model=loaded.identity)
                if chosen.format == "json"
                else viz.ablation_csv(report)
            )
        if chosen.format == "terminal":
            table = viz.ablation_table(report)
            return "\n".join([*aligned(table, right=table[0][2:]), ""])
        plots, title = viz.ablation_plots(report), f"What each part of {name} is worth"
    return render_plots(plots, chosen.format, title=title, to_file=chosen.path is not None, notes=notes)
