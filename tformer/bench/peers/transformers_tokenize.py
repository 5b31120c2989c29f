"""A fast tokenizer of transformers, with our vocabulary: texts in lists, ids alone out."""

from __future__ import annotations

from tokenizers import Tokenizer as RustTokenizer

from tformer.bench.peers.transformers_models import quiet
from tformer.bench.workloads import Task
from tformer.bench.workloads.tokenize import (
    texts_of,
    tokenizer_of,
    use_threads,
)


def make(task: Task, precision: str) -> TransformersTokenizing:
    return TransformersTokenizing(task, precision)


class TransformersTokenizing:
    """`PreTrainedTokenizerFast`, without special tokens, masks and type ids."""

    name = "transformers"

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        from transformers import PreTrainedTokenizerFast

        quiet()
        use_threads()
        self._batches = texts_of(self.task)
        rust = RustTokenizer.from_str(tokenizer_of(self.task).to_json())
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust)

    def run(self) -> int:
        tokens = 0
        for texts in self._batches:
            found = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
            )
            tokens += sum(map(len, found["input_ids"]))
        return tokens
