"""A causal language model for lm-evaluation-harness (the package lm_eval, extra `lm-eval`): its `hf` backend reads the
model's export.

`tformer evaluate --tasks` uses it; in Python: `lm_eval.simple_evaluate(HarnessModel(tformer.load(RUN)), tasks=[...])`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval.models.huggingface import HFLM

from tformer.interop.exporting import export_checkpoint
from tformer.interop.opening import open_checkpoint
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.support.formatting import describe
from tformer.workers.work import QUIET, Work

BATCH_TOKENS = 4096


class HarnessModel(HFLM):
    """lm_eval's model of transformers, on the model's device and in its number format.

    Args:
        loaded: the model as it is in memory is measured.
        batch_size: examples at a time; None: 4,096 tokens.
        keep: False frees the memory of `loaded.model`, which lm_eval's copy replaces.
        work: polled before each forward pass.

    Raises InputError for a model with an encoder, and for one that `tformer export` does not write.
    """

    def __init__(self, loaded: Loaded, *, batch_size: int | None = None, keep: bool = True, work: Work = QUIET) -> None:
        if loaded.model.encoder is not None:
            raise InputError(f"{loaded.path} has an encoder: tasks of lm_eval are run with decoders only")
        with TemporaryDirectory(prefix="tformer-lm-eval-") as folder:
            path, device = Path(folder) / "model", str(next(loaded.model.parameters()).device)
            dtype, weights = loaded.model.compute_dtype, loaded.model.state_dict()
            export_checkpoint(open_checkpoint(loaded.path), path, dtype=dtype, weights=weights, work=work)
            if not keep:
                del weights
                loaded.model.to("meta")
            super().__init__(
                str(path),
                device=device,
                dtype=dtype,
                softmax_dtype="float32",  # sums of log-probabilities in bf16 would be multiples of a half
                batch_size=batch_size or max(1, BATCH_TOKENS // loaded.model.max_seq_len),
                logits_cache=False,  # it uses the logits of one window for windows that are cut differently
                trust_remote_code=True,  # the export's own code, of a model that no class of transformers computes
            )
        self.model.generation_config.max_new_tokens = None  # it would go before the length that the task states
        self.model.register_forward_pre_hook(lambda *_: work.raise_if_stopped("before every example was read"))

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
        """lm_eval's answers. Raises InputError for a continuation that the model's context does not hold."""
        most = self.max_length
        for _, _, ids in requests:
            if not 0 < len(ids) <= most:
                text = describe(self.tok_decode(ids))
                raise InputError(f"lm_eval: a continuation, {text}, has {len(ids)} tokens, expected 1 to {most}")
        return super()._loglikelihood_tokens(requests, *args, **options)
