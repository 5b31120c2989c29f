"""`tformer embed`: a vector for each text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import console, data_output, show_notes
from tformer.evaluation.vector_options import NPY, EmbedOptions
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT, refuse_to_replace, require_writable

if TYPE_CHECKING:
    import numpy as np

    from tformer.data.sources.labelled import LabelledSource
    from tformer.data.sources.tables import LabelledRow
    from tformer.decoding.lines import Text
    from tformer.loading import Loaded

EPILOG = examples(
    '`tformer embed --text "A red apple"`',
    "`tformer embed --input texts.txt --output texts.npy`",
    "`tformer embed runs/sentences --input texts.csv --output texts.parquet`",
)


@takes_options
def embed(options: EmbedOptions) -> None:
    """Turn texts into vectors, to compare or to search them.

    Every line, or row of a table, gives one vector, in order. A table comes back, as jsonl or Parquet, with its columns
    and a column `vector`. Beside a file .npy, a NumPy array, stands FILE.npy.jsonl with the texts and the name of the
    model, for `tformer search`.
    """
    options.check_command()
    refuse_to_replace(options.output, options.files)
    with StopFlag() as flag:
        from tformer.data.sources.columns import parse_column
        from tformer.data.sources.labelled import open_texts
        from tformer.decoding.lines import is_table

        loaded, sha256 = load_for_vectors(options.run, options)
        show_notes([f"embedding with {loaded.path}", *loaded.notes], dim=True)
        source, cut = None, list[int]()
        path, by_column = options.input_path or STANDARD_INPUT, options.text_column is not None
        if options.text is None and is_table(path, by_column=by_column or options.delimiter is not None):
            column, trained = parse_column(options.text_column), loaded.recipe.data.columns.text
            source = open_texts(path, column=column, trained=trained, reading=options.reading)
            show_notes(source.notes)
        vectors_of = partial(embedded, loaded=loaded, options=options, flag=flag, cut=cut)
        if options.output is not None and options.output.suffix.lower() == NPY:
            _write_npy(options, options.output, loaded, sha256, source, vectors_of)
        else:
            _write_rows(options, source, vectors_of)
        if sum(cut):
            console.print(
                f"{sum(cut):,} texts are longer than {loaded.recipe.seq_len} tokens and were cut", markup=False
            )


def load_for_vectors(run: str | None, options: EmbedOptions) -> tuple[Loaded, str]:
    """(the model of a path, prepared to embed texts, the hash of its weights). Raises InputError for one of images."""
    from tformer.decoding.inference import prepare_loaded
    from tformer.loading import load, weights_hash
    from tformer.support.device import resolve_device

    loaded = load(run, device=resolve_device(options.device), which=options.checkpoint)
    if loaded.recipe.model.patches is not None:
        raise InputError(f"{loaded.path} reads images, expected a model of texts", hint="in Python: run.embed(paths)")
    sha256 = weights_hash(loaded)
    prepare_loaded(loaded, options.precision, options.quantize)
    return loaded, sha256


def embedded(
    texts: Sequence[Text], loaded: Loaded, options: EmbedOptions, flag: StopFlag, cut: list[int]
) -> np.ndarray:
    """fp32 [N, D]: the vectors of texts. Interrupted after a signal. cut: gets the number of texts that were cut."""
    from tformer.evaluation.embed import embed_texts
    from tformer.workers.work import Work

    work = Work(should_stop=flag.should_stop)
    vectors_ND = embed_texts(loaded, texts, options, on_cut=lambda count, _: cut.append(count), work=work)
    work.raise_if_stopped("while embedding")
    return vectors_ND


def _blocks(options: EmbedOptions, rows: Iterable[LabelledRow] | None) -> Iterator[list[Text]]:
    """The texts of `--text`, of a table's rows, or of lines."""
    from tformer.decoding.lines import row_blocks, text_blocks

    if options.text is not None:
        return iter([[(options.text, None)]])
    if rows is not None:
        return row_blocks(iter(rows))
    return text_blocks(options.input_path or STANDARD_INPUT, pairs=False, reading=options.reading)


def _write_rows(
    options: EmbedOptions, source: LabelledSource | None, vectors_of: Callable[[list[Text]], np.ndarray]
) -> None:
    """Write jsonl or Parquet: the table's columns, or the text, and the vector."""
    from tformer.cli.answers import Answers
    from tformer.workers.worker import ALONE

    with data_output(options.output, ALONE) as output:
        form = SimpleNamespace(output=options.output or Path("vectors.jsonl"), as_json=False)
        answers = Answers(output, form, source, inputs=["text"], columns=[("vector", "list")])
        with answers.written("" if options.text is not None else "texts"):
            for texts in _blocks(options, answers.rows()):
                pairs = zip(texts, vectors_of(texts).tolist(), strict=True)
                answers.write_cells(([text], [vector]) for (text, _), vector in pairs)
                answers.done += len(texts)


def _write_npy(
    options: EmbedOptions,
    output: Path,
    loaded: Loaded,
    sha256: str,
    source: LabelledSource | None,
    vectors_of: Callable[[list[Text]], np.ndarray],
) -> None:
    """Write a NumPy array, and beside it the texts and what `tformer search` needs to read a query the same way."""
    from tformer.evaluation.search import beside, write_texts, write_vectors

    for path in (output, beside(output)):
        require_writable(path)
        refuse_to_replace(path, options.files)
    blocks = list(_blocks(options, None if source is None else source.rows()))  # the header has the number of texts
    if not blocks:
        raise InputError(f"{options.files[0]}: no texts")
    names = ("pooling", "normalize", "dimensions", "layer")
    facts = {
        "run": str(loaded.path.absolute()),
        "sha256": sha256,
        "options": {name: getattr(options, name) for name in names},
    }
    count, width = sum(map(len, blocks)), options.dimensions or loaded.recipe.model.d_model
    write_vectors(output, map(vectors_of, blocks), count=count, width=width, dtype=options.dtype)
    write_texts(output, facts, (text for block in blocks for text, _ in block))
    note = f"wrote {output} ({count:,} vectors of {width} numbers, {options.dtype}) and {beside(output)}"
    show_notes([note], dim=True)
