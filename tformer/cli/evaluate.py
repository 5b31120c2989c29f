"""`tformer evaluate`: metrics of a model on its held-out data or on other data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json, progress_reporter
from tformer.cli.workers import refuse_standard_input, run_in_workers
from tformer.evaluation.options import EvaluationOptions
from tformer.support.options import flag_words
from tformer.workers.work import Job

if TYPE_CHECKING:
    from tformer.workers.worker import Worker

EPILOG = examples(
    "`tformer evaluate --data valid.txt`",
    "`tformer evaluate --data test.tsv --mistakes mistakes.tsv --json`",
    "`tformer evaluate runs/classifier --data test.tsv --plot evaluation.html`",
    "`tformer evaluate runs/gpt-small-1 --data valid.txt --by position --plot positions.svg`",
    "`tformer evaluate --source test.en --target test.de --beam-size 5 --lowercase`",
    "`tformer evaluate runs/gpt-small-1 --data valid.txt --stride 32 --checkpoint latest`",
    "`tformer evaluate runs/gpt-small-1 --score --source prompts.txt --target continuations.txt`",
    "`tformer evaluate runs/gpt-small-1 --tasks lambada_openai,my-task.yaml`",
    "`tformer evaluate runs/gpt-small-1 --data book.txt --devices 2`",
)


@takes_options
def evaluate(options: EvaluationOptions) -> None:
    """Measure a model on the run's validation data or on --data.

    A causal language model: loss (nats per token), perplexity, bits per byte and accuracy over every token of a text,
    each predicted once. A masked language model: loss and accuracy on masked tokens. A classifier: accuracy with a 95 %
    confidence interval, macro F1, Matthews correlation, expected calibration error, and the metrics of each class. A
    regression: correlations and error. Tagged words: strict F1 of entities. Questions: exact match and F1 of answers. A
    model of vectors: correlations of cosines with scores, or recall, MRR and nDCG of texts that look for their
    partners. A sequence-to-sequence model: loss and token accuracy on the targets; BLEU and chrF (with signatures) and
    exact matches of the generated outputs.
    """
    refuse_standard_input(options.devices, options.data, options.source, options.target)
    output = None
    if options.plot is not None:
        from tformer.viz.evaluation import choose_plot

        output = choose_plot(options.plot)
    with StopFlag() as flag:

        def measure(worker: Worker) -> None:
            from tformer.tasks.evaluate import evaluate_model, report_lines
            from tformer.workers.work import Work

            note = partial(console.print, markup=False)
            task, report = evaluate_model(options, Work(progress_reporter, flag.should_stop, note, group=worker))
            worker.total(0)  # the leader waits for the others, as it may keep the store
            if not worker.leads:
                return
            if output is not None:
                from tformer.viz.evaluation import draw_report

                report = draw_report(report, output)
            if options.as_json:
                emit_json(report)
                return
            for line in report_lines(task, report):
                emit(line)

        job = Job(measure, ["evaluate", *flag_words(options)])
        run_in_workers(lambda _: job, devices=options.devices, device=options.device, stop=flag)
