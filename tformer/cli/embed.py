"""`tformer embed`: a vector for each text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.report import console, data_output, progress_reporter, show_notes
from tformer.cli.workers import answer_in_workers
from tformer.evaluation.vector_options import NPY, EmbedOptions
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT, refuse_to_replace, require_writable
from tformer.workers.work import Work

if TYPE_CHECKING:
    import numpy as np

    from tformer.cli.process import StopFlag
    from tformer.data.sources.tables import LabelledRow
    from tformer.decoding.lines import Text
    from tformer.loading import Loaded
    from tformer.workers.worker import Worker

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

    def answer(worker: Worker, flag: StopFlag) -> None:
        from tformer.evaluation.embed import load_for_vectors

        to_index = options.ending == NPY
        loaded, sha256 = worker.in_turn(lambda: load_for_vectors(options.run, options, hashed=to_index))
        show_notes([f"embedding with {loaded.path}", *loaded.notes], dim=True)
        session = _EmbedSession(options, loaded, Work(progress_reporter, flag.should_stop, group=worker))
        if to_index and options.output is not None:
            session.write_index(options.output, sha256)
        else:
            session.write_rows()
        if session.cut:
            length = loaded.recipe.seq_len
            console.print(f"{session.cut:,} texts are longer than {length} tokens and were cut", markup=False)

    answer_in_workers("embed", options, answer)


class _EmbedSession:
    """Embeds every text in its order and writes the vectors. Several workers divide the batches; the leader writes.

    Attributes:
        cut: texts so far that were longer than in training.
    """

    def __init__(self, options: EmbedOptions, loaded: Loaded, work: Work) -> None:
        from tformer.data.sources.columns import parse_column
        from tformer.data.sources.labelled import open_texts
        from tformer.decoding.lines import reads_table

        self.options, self.loaded, self.work, self.cut = options, loaded, work, 0
        self.path, self.source = options.input_path or STANDARD_INPUT, None
        if options.text is None and reads_table(options):
            column, trained = parse_column(options.text_column), loaded.recipe.data.columns.text
            self.source = open_texts(self.path, column=column, trained=trained, reading=options.reading)
            show_notes(self.source.notes)

    def write_rows(self) -> None:
        """Write jsonl or Parquet: the table's columns, or the text, and the vector."""
        from tformer.cli.answers import Answers

        with data_output(self.options.output, self.work.worker) as output:
            form = SimpleNamespace(output=self.options.output or Path("vectors.jsonl"), as_json=False)
            answers = Answers(output, form, self.source, inputs=["text"], columns=[("vector", "list")])
            with answers.written("" if self.options.text is not None else "texts"):
                for texts in self._blocks(answers.rows()):
                    vectors_ND = self._vectors(texts, self.work)
                    if output.leads:
                        pairs = zip(texts, vectors_ND.tolist(), strict=True)
                        answers.write_cells(([text], [vector]) for (text, _), vector in pairs)
                        answers.done += len(texts)

    def write_index(self, output: Path, sha256: str) -> None:
        """Write a NumPy array, and beside it the texts and what `tformer search` needs to read a query the same way.

        Memory does not grow with a file: it is read to count its texts, for the vectors, and for the texts. Raises
        InputError where it changes meanwhile.
        """
        from tformer.evaluation.search import How, beside, write_texts, write_vectors

        for path in (output, beside(output)):
            require_writable(path)
            refuse_to_replace(path, self.options.files)
        kept = None if self.source is not None or Path(self.path).is_file() else [*self._blocks()]

        def blocks() -> Iterable[list[Text]]:
            return self._blocks() if kept is None else kept

        count, width = sum(map(len, blocks())), self.options.dimensions or self.loaded.recipe.model.d_model
        if not count:
            raise InputError(f"{self.path}: no texts")

        def vectors(part: Work) -> Iterator[np.ndarray]:
            done = 0
            for texts in blocks():
                yield self._vectors(texts, part.piece(done, count))
                done += len(texts)

        with self.work.part("embedding", count, "texts") as part:
            if not self.work.worker.leads:
                deque(vectors(part), maxlen=0)
                return
            write_vectors(output, vectors(part), count=count, width=width, dtype=self.options.dtype)
        how = {each.name: getattr(self.options, each.name) for each in fields(How)}
        facts = {"run": str(self.loaded.path.absolute()), "sha256": sha256, "options": how}
        write_texts(output, facts, (text for block in blocks() for text, _ in block))
        note = f"wrote {output} ({count:,} vectors of {width} numbers, {self.options.dtype}) and {beside(output)}"
        show_notes([note], dim=True)

    def _blocks(self, rows: Iterable[LabelledRow] | None = None) -> Iterator[list[Text]]:
        """Blocks of texts from `--text`, a table's rows or lines."""
        from tformer.decoding.lines import row_blocks, text_blocks

        if self.options.text is not None:
            return iter([[(self.options.text, None)]])
        if self.source is not None:
            return row_blocks(rows or self.source.rows())
        return text_blocks(self.path, pairs=False, reading=self.options.reading)

    def _vectors(self, texts: list[Text], work: Work) -> np.ndarray:
        from tformer.evaluation.embed import embed_texts

        def count(number: int, _: int) -> None:
            self.cut += number

        return embed_texts(self.loaded, texts, self.options, on_cut=count, work=work)
