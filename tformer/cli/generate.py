"""`tformer generate`: text from a trained model: continued, translated, or with its masks filled."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import data_output
from tformer.decoding.options import GenerateOptions
from tformer.output_files import refuse_to_replace

EPILOG = examples(
    "`tformer generate`",
    '`tformer generate runs/gpt-tiny-1 --prompt "The " --temperature 0.8 --top-k 50 --num-samples 3`',
    "`tformer generate --input prompts.txt --output completions.jsonl --greedy --json`",
    "`tformer generate runs/transformer-tiny-1 --input test.en --output test.de --beam-size 5 --length-penalty 1`",
    "`tformer generate --ensemble runs/a runs/b --input test.en --n-best 3 --alignments --json`",
    '`tformer generate runs/bert-tiny-1 --prompt "The [MASK] sat." --top-k 10`',
)


@takes_options
def generate(options: GenerateOptions) -> None:
    """Continue or translate a text, or each line of a file, with a trained model.

    Options that are not given take their values from the model's recipe. A prompt is shown with its continuation,
    streamed on a terminal; lines of --input give completions only, with line ends inside them written as \\\\n. An
    empty prompt starts from the model's start token.

    An encoder-decoder (transformer, T5, BART) turns each source into a target by beam search, with the recipe's beam
    size, unless --greedy or a sampling option is given. An empty line gives an empty line. Lines of standard input are
    answered as they arrive. A decoder-only model (GPT) uses beam search when one of its options is given.

    A masked language model (BERT) fills each [MASK] of the prompt: the most probable tokens, one a line, with their
    probabilities and the text that each gives.
    """
    options.check()
    refuse_to_replace(options.output, options.files)
    with StopFlag() as flag, data_output(options.output) as output:
        from tformer.cli.generate_run import run

        run(options, flag, output)
