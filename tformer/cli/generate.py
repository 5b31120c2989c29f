"""`tformer generate`: text from a trained model: continued, translated, or with its masks filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.report import data_output
from tformer.cli.workers import answer_in_workers
from tformer.decoding.options import GenerateOptions

if TYPE_CHECKING:
    from tformer.cli.process import StopFlag
    from tformer.workers.worker import Worker

EPILOG = examples(
    '`tformer generate --prompt "The " --temperature 0.8 --top-k 50 --num-samples 3`',
    "`tformer generate --input prompts.txt --output completions.jsonl --json`",
    "`tformer generate --input test.en --output test.de --beam-size 5`",
    "`tformer generate runs/transformer-base-1 --input test.en --output test.de --beam-size 5 --length-penalty 1`",
    "`tformer generate --ensemble runs/a runs/b --input test.en --n-best 3 --alignments --json`",
    '`tformer generate runs/bert-base-1 --prompt "The [MASK] sat." --top-k 10`',
)


@takes_options
def generate(options: GenerateOptions) -> None:
    """Continue or translate texts with a trained model.

    A prompt is printed with its continuation; with --input only the completions are printed, one per line, with
    newlines written as `\\n`. An empty prompt starts from the model's start token. A table comes back with its columns
    and the completions in a column `output`.

    An encoder-decoder (transformer, T5, BART) turns each source into a target. It uses beam search with the recipe's
    beam size, or greedy decoding or sampling if you give those options. An empty input line gives an empty output line.
    Lines of standard input are answered as they arrive. A decoder-only model (GPT) samples, and uses beam search if
    you give an option of the group "Beam search".

    A masked language model (BERT) fills each [MASK] of the prompt: it prints the most probable tokens, one per line,
    with their probabilities and the resulting texts.
    """

    def answer(worker: Worker, flag: StopFlag) -> None:
        from tformer.cli.generate_run import run

        with data_output(options.output, worker) as output:
            run(options, flag, output, worker)

    answer_in_workers("generate", options, answer)
