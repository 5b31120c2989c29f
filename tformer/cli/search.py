"""`tformer search`: the texts of an embedded file that are nearest to a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import data_output, show_notes
from tformer.evaluation.vector_options import EmbedOptions, SearchOptions
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import as_cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tformer.decoding.lines import Text

EPILOG = examples(
    '`tformer search texts.npy "fruit that is red"`',
    "`tformer search texts.npy --input queries.txt --top-k 3 --json`",
    '`tformer search texts.npy "red fruit" --run runs/sentences --texts texts.txt`',
)


@takes_options
def search(options: SearchOptions) -> None:
    """Find the texts of an embedded file nearest to a query.

    Each line has the cosine, the number of the text in the index (from 0) and the text; of several queries, the query
    before them. All vectors are compared, so the result is exact; the file is mapped, not read into memory.
    """
    with StopFlag() as flag:
        from tformer.data.sources.reading import Reading
        from tformer.decoding.lines import text_blocks
        from tformer.evaluation.embed import embed_texts, load_for_vectors
        from tformer.evaluation.search import VectorIndex
        from tformer.workers.work import Work
        from tformer.workers.worker import ALONE

        index = VectorIndex.open(options.index, texts=options.texts)
        if (run := options.run or index.facts.run) is None:
            hint = "name it with --run RUN"
            raise InputError(f"{options.index}: nothing says which model made the vectors", hint=hint)
        how = EmbedOptions(**vars(index.facts.options), device=options.device)
        try:
            loaded, sha256 = load_for_vectors(run, how)
        except InputError as error:
            error.hint = error.hint if options.run else f"{options.index} names this model: name another with --run RUN"
            raise
        if index.facts.sha256 not in (None, sha256):
            hint = "embed the texts again, or name the model with --run"
            raise InputError(f"{options.index} was made by other weights than those of {loaded.path}", hint=hint)
        show_notes([f"{len(index):,} vectors of {options.index}, queries by {loaded.path}"], dim=True)
        blocks: Iterable[Sequence[Text]] = [[(options.query or "", None)]]
        if options.query is None:
            blocks = text_blocks(options.input_path or STANDARD_INPUT, pairs=False, reading=Reading())
        with data_output(None, ALONE) as output:
            for queries in blocks:
                vectors_QD = embed_texts(loaded, queries, how, work=Work(should_stop=flag.should_stop))
                for (query, _), rows, cosines in zip(queries, *index.nearest(vectors_QD, options.top), strict=True):
                    found = [
                        {"cosine": cosine, "row": row} | ({} if index.texts is None else {"text": index.texts[row]})
                        for row, cosine in zip(rows.tolist(), cosines.tolist(), strict=True)
                    ]
                    if options.as_json:
                        output.documents([{"query": query, "results": found}])
                        continue
                    before = [] if options.query is not None else [as_cell(query)]
                    for each in found:
                        cells = [*before, f"{each['cosine']:.4f}", str(each["row"]), as_cell(str(each.get("text", "")))]
                        output.text("\t".join(cells).rstrip("\t") + "\n")
