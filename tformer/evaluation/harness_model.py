"""A causal language model as a model of lm-evaluation-harness (the package lm_eval, extra `lm-eval`).

`tformer evaluate --tasks` uses it. In Python an import of this file registers it as `tformer`:

    import tformer.evaluation.harness_model
    lm_eval.simple_evaluate("tformer", {"pretrained": "runs/gpt-tiny-1"}, tasks=["lambada_openai"])

Texts are tokenized, cut and joined as the harness's `hf` backend does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tformer.data.encoding import start_ids
from tformer.decoding.generate import generate
from tformer.decoding.inference import inference_dtype
from tformer.decoding.options import BATCH_OF_PROMPTS, batch_on
from tformer.decoding.prompts import suppressed_tokens
from tformer.decoding.score import score_continuations
from tformer.decoding.settings import GenerationSettings
from tformer.loading import Loaded, load
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.support.formatting import listed
from tformer.workers.work import QUIET, Work

BATCH_TOKENS = 4096
NEW_TOKENS = 256  # where a task does not say
# Keyword of a task's generation -> ours.
GENERATION = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "min_new_tokens": "min_new_tokens",
    "no_repeat_ngram_size": "no_repeat_ngram",
}

# (context and continuation as texts, or None for a window of a text; the ids of both)
Request = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("tformer")
class HarnessModel(TemplateLM):
    """A causal language model for lm_eval: log-likelihoods of continuations and of whole texts, and generation.

    Args:
        pretrained: a run, a checkpoint or a Hugging Face folder, or a model that is loaded.
        checkpoint, device, precision: of a folder, as the flags of `tformer evaluate`.
        batch_size: examples at a time; None or "auto": 4,096 tokens when scoring, 16 texts when generating, more on a
            GPU. `max_batch_size` is not used.
        work: reports the examples done, and is polled between batches.

    Raises InputError for a model that is no causal language model.
    """

    def __init__(
        self,
        pretrained: str | Path | Loaded,
        *,
        checkpoint: str = "best",
        device: str | None = None,
        precision: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        work: Work = QUIET,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, Loaded):
            place = resolve_device(device or "auto")
            pretrained = load(pretrained, device=place, which=checkpoint, kinds={"lm"})
            trained_in = pretrained.recipe.training.precision
            pretrained.model.compute_dtype = inference_dtype(precision, trained_in=trained_in, device=place)
        if pretrained.model.encoder is not None:
            raise InputError(f"{pretrained.path} has an encoder: tasks of lm_eval are run with decoders only")
        self._loaded, self._work = pretrained, work
        self._reader = pretrained.text_tokenizer.reading_special()
        rows = str(batch_size or "auto")
        self._rows = None if rows.startswith("auto") else int(rows)
        self.max_length = pretrained.model.max_seq_len
        self._start = self._reader.decode([self.prefix_token_id], skip_special=False)

    @property
    def eot_token_id(self) -> int | None:
        """The token that ends a text; None: the tokenizer has none."""
        return self._reader.special.eos

    @property
    def prefix_token_id(self) -> int:
        """The token that takes the place of an empty context."""
        return start_ids(self._reader)[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, after the tokens that open every text, unless the text itself begins with these."""
        begun = add_special_tokens is None and string.startswith(self._start)
        opening = () if begun or add_special_tokens is False else self._reader.opening
        return [*opening, *self._reader.encode(string)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding gives it) of each continuation after its context."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding gives it) of each continuation; long contexts lose their start."""
        contexts, targets = list[list[int]](), list[list[int]]()
        for texts, context, target in requests:
            room = self.max_length + 1 - len(target)  # the last token is only predicted
            if room < 1:
                found = "" if texts is None else f" {texts[1]!r}"
                raise InputError(
                    f"the continuation{found} has {len(target):,} tokens, the model's context holds {self.max_length:,}"
                )
            contexts.append((context or [self.prefix_token_id])[-room:])
            targets.append(target)
        with self._work.part("scoring", total=len(requests), unit="continuations") as part:
            scores = score_continuations(
                self._loaded.model,
                contexts,
                targets,
                batch_tokens=BATCH_TOKENS if self._rows is None else self._rows * self.max_length,
                greedy=True,
                work=part,
            )
        self._work.raise_if_stopped("before every continuation was read")
        return [(score.logprob, score.is_greedy is not False) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, every token predicted once, in windows that do not overlap."""
        windows: list[tuple[int, Request]] = [
            (number, (None, *make_disjoint_window(window)))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
        ]
        totals, scored = [0.0] * len(requests), self._loglikelihood_tokens([window for _, window in windows])
        for (number, _), (logprob, _) in zip(windows, scored, strict=True):
            totals[number] += logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, cut before the first of its stop texts."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        prompts = [self.tok_encode(request.args[0]) or start_ids(self._reader) for request in requests]
        rows = self._rows or batch_on(self._loaded.model, BATCH_OF_PROMPTS)
        with self._work.part("generating", total=len(requests), unit="texts") as part:
            done = 0
            for numbers in groups.values():
                settings = self._settings(requests[numbers[0]].args[1])
                room = self.max_length - settings.max_new_tokens
                longest_first = sorted(numbers, key=lambda number: -len(prompts[number]))
                for first in range(0, len(longest_first), rows):
                    batch = longest_first[first : first + rows]
                    found = generate(
                        self._loaded.model,
                        [prompts[number][-room:] for number in batch],
                        settings,
                        tokenizer=self._reader,
                        suppressed=suppressed_tokens(
                            self._reader.special, eos=settings.eos_id, suppressed=settings.suppress_tokens
                        ),
                        should_stop=part.should_stop,
                    )
                    part.raise_if_stopped("before every text was written")
                    done += len(batch)
                    part.report(done, len(requests))
                    for number, [completion] in zip(batch, found, strict=True):
                        text = self._reader.decode(completion.ids)
                        answers[number] = postprocess_generated_text(text, list(settings.stop_texts), None)
        return answers

    def _settings(self, keywords: dict[str, Any]) -> GenerationSettings:
        """The settings of a task's generation over those of the recipe: greedy without `do_sample`."""
        try:
            given = normalize_gen_kwargs(keywords, NEW_TOKENS)
        except (TypeError, ValueError) as error:
            raise InputError(f"the task's generation_kwargs: {error}") from None
        stops, new = given.pop("until"), given.pop("max_gen_toks")
        if given.pop("do_sample") is not True:
            given["temperature"] = 0.0
        if odd := sorted(given.keys() - GENERATION.keys()):
            raise InputError(f"the task's generation_kwargs have {listed(odd, 5)}, which tformer does not support")
        if new >= self.max_length:
            raise InputError(
                f"the task writes {new:,} tokens (max_gen_toks), the model's context holds {self.max_length:,}",
                hint="a smaller max_gen_toks in the task's generation_kwargs",
            )
        return GenerationSettings.from_recipe(
            self._loaded.recipe.generation,
            eos_id=self.eot_token_id,
            max_new_tokens=new,
            stop_texts=tuple(filter(None, stops)),
            **{GENERATION[key]: value for key, value in given.items()},
        )
