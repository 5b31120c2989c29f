"""The part of `tformer generate` for masked language models: the best tokens for each mask of a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tformer.cli.report import (
    StopFlag,
    console,
)
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    from tformer.decoding.fill_mask import Candidate
    from tformer.decoding.output import Write
    from tformer.loading import Loaded

DEFAULT_TOP = 5


def refuse_options(**given: object) -> None:
    """Raise InputError for the first of generate's options that was given and says nothing about masks."""
    for name, value in given.items():
        if value is not None:
            raise InputError(
                f"--{name.replace('_', '-')} is for models that continue a text; this one fills masks",
                hint="--top-k N chooses how many tokens are shown for each mask",
            )


class MaskFiller:
    """A loaded masked language model, and where its answers go."""

    def __init__(
        self, loaded: Loaded, flag: StopFlag, write: Write, *, top_k: int | None, as_json: bool, on_terminal: bool
    ) -> None:
        if top_k is not None and top_k < 1:
            raise InputError(f"--top-k must be at least 1 to fill masks, found {top_k}")
        self.loaded, self.flag, self.write = loaded, flag, write
        self.top = top_k or DEFAULT_TOP
        self.as_json, self.on_terminal = as_json, on_terminal

    def fill(self, prompt: str | None, input_path: str | None, errors: str) -> None:
        """Answer `--prompt`, or each line of `--input` on a line of its own.

        Raises InputError for a text without a mask, or for neither of the two.
        """
        if prompt is None and input_path is None:
            raise InputError(
                f"{self.loaded.path} fills masks, and there is none to fill",
                hint='for example --prompt "The [MASK] sat."',
            )
        for note in (f"filling masks with {self.loaded.path}", *self.loaded.notes):
            console.print(note, style="dim", markup=False)
        if prompt is not None:
            masks = self._candidates(prompt)
            self._show(self._document(0, prompt, masks) if self.as_json else in_lines(masks))
        elif input_path is not None:
            self._fill_lines(input_path, errors)

    def _fill_lines(self, path: str, errors: str) -> None:
        from tformer.decoding.prompts import STDIN_NAME, read_lines

        name = STDIN_NAME if path == "-" else path
        for index, line in enumerate(read_lines(path, errors="replace" if errors == "replace" else "strict")):
            try:
                masks = self._candidates(line)
            except InputError as error:
                raise InputError(f"{name}:{index + 1}: {error.message}", hint=error.hint) from error
            if self.flag.should_stop():
                raise self.flag.interrupted(f"interrupted after {index} prompts")
            self._show(self._document(index, line, masks) if self.as_json else in_one_line(masks))

    def _candidates(self, text: str) -> list[list[Candidate]]:
        from tformer.decoding.fill_mask import fill_mask

        return fill_mask(self.loaded.model, self.loaded.text_tokenizer, text, top=self.top)

    def _document(self, index: int, prompt: str, masks: list[list[Candidate]]) -> str:
        answers = [
            [{"token": c.token, "id": c.id, "probability": c.probability, "text": c.text} for c in candidates]
            for candidates in masks
        ]
        document = {"index": index, "prompt": prompt, "masks": answers}
        # ASCII alone on a terminal: JSON leaves some control characters as they are.
        return json.dumps(document, ensure_ascii=self.on_terminal, allow_nan=False) + "\n"

    def _show(self, text: str) -> None:
        self.write(visible(text) if self.on_terminal else text)


def in_lines(masks: list[list[Candidate]]) -> str:
    """A line per candidate: token, probability and text, parted by tabs; an empty line parts the masks."""
    from tformer.formatting import as_one_line

    return "\n".join(
        "".join(f"{as_one_line(c.token)}\t{c.probability:.4f}\t{as_one_line(c.text)}\n" for c in candidates)
        for candidates in masks
    )


def in_one_line(masks: list[list[Candidate]]) -> str:
    """The tokens and probabilities of all masks on one line, parted by tabs, with `|` between masks."""
    from tformer.formatting import as_one_line

    return (
        "\t|\t".join(
            "\t".join(f"{as_one_line(c.token)}\t{c.probability:.4f}" for c in candidates) for candidates in masks
        )
        + "\n"
    )
