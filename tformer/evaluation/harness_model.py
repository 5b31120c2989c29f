"""A causal language model for lm-evaluation-harness (the package lm_eval, extra `lm-eval`): its `hf` backend reads the
model's export.

`tformer evaluate --tasks` uses it; in Python: `lm_eval.simple_evaluate(HarnessModel(tformer.load(RUN)), tasks=[...])`.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from lm_eval.models.huggingface import HFLM

from tformer.interop.exporting import export_checkpoint
from tformer.interop.opening import open_checkpoint
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.workers.work import QUIET, Work

BATCH_TOKENS = 4096


class HarnessModel(HFLM):
    """lm_eval's model of transformers, on the model's device and in its number format.

    Args:
        loaded: its stored weights are measured; changes of the model in memory are not.
        batch_size: examples at a time; None: 4,096 tokens.
        work: polled before each forward pass.

    Raises InputError for a model with an encoder, and for one that `tformer export` does not write.
    """

    def __init__(self, loaded: Loaded, *, batch_size: int | None = None, work: Work = QUIET) -> None:
        if loaded.model.encoder is not None:
            raise InputError(f"{loaded.path} has an encoder: tasks of lm_eval are run with decoders only")
        with TemporaryDirectory(prefix="tformer-lm-eval-") as folder:
            path = Path(folder) / "model"
            export_checkpoint(open_checkpoint(str(loaded.path)), path, work=work)
            super().__init__(
                str(path),
                device=str(next(loaded.model.parameters()).device),
                dtype=loaded.model.compute_dtype,
                softmax_dtype="float32",  # sums of log-probabilities in bf16 would be multiples of a half
                batch_size=batch_size or max(1, BATCH_TOKENS // loaded.model.max_seq_len),
                logits_cache=False,  # it uses the logits of one window for windows that are cut differently
                trust_remote_code=True,  # the export's own code, of a model that no class of transformers computes
            )
        self.model.generation_config.max_new_tokens = None  # it would go before the length that the task states
        self.model.register_forward_pre_hook(lambda *_: work.raise_if_stopped("before every example was read"))
