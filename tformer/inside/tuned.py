"""Tuned lens: a learned affine map for each layer before the answer (arXiv 2303.08112, section 3).

    logits after layer l = head(final_norm(h_l + A_l h_l + b_l)),   loss KL(model's answer || answer after layer l)

A and b start at zero, as the logit lens; the last layer has none. The model does not change. The paper takes SGD with
Nesterov momentum for 250 steps of 2^18 tokens; here Adam takes as many steps of some thousand tokens, and its rate
falls linearly to zero. The KL before and after is of windows at the end of the text, which are not trained on.
"""

# Shapes: R rows (the input and each layer but the last), B windows, T positions, M = B T, D d_model.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tformer.checkpoint.tensor_files import file_bytes, read_tensors, tensor_chunks
from tformer.decoding.inference import inference
from tformer.inside.lens import divergence, log_probabilities, states_of
from tformer.model import Transformer
from tformer.nn.heads import VocabularyHead
from tformer.nn.losses import LOGIT_ELEMENTS
from tformer.support.errors import InputError
from tformer.support.files import write_file
from tformer.workers.work import QUIET, Work

SIDE, HEAD = "decoder", "lm"
STEPS, STEP_TOKENS, LR, SEED = 250, 1024, 1e-3, 0
HELD_OUT, MOST_HELD_OUT = 10, 8  # one window of this number is held out, and at most this number


@dataclass(frozen=True)
class TunedLens:
    """Maps of a tuned lens for the stream before the final norm.

    Attributes:
        weights: A of each row [R, D, D]. biases: b [R, D].
        kl: nats of each row on held-out text, of the logit lens and of this one [2, R].
        sha256: of the model's weights, 32 bytes.
    """

    weights: Tensor
    biases: Tensor
    kl: Tensor
    sha256: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """States [R + 1, M, D] -> states; those after the last layer stay."""
        inner = states[:-1]
        moved = inner + torch.baddbmm(self.biases.unsqueeze(1), inner, self.weights.transpose(1, 2))
        return torch.cat([moved, states[-1:]])


def fit(
    model: Transformer,
    ids: Sequence[int],
    *,
    seq_len: int,
    sha256: str,
    steps: int = STEPS,
    work: Work = QUIET,
) -> TunedLens:
    """Train the maps of a decoder-only language model on a text.

    Args:
        ids: tokens of the text.
        seq_len: the largest window; a shorter text has shorter ones, so that a tenth can be held out.
        sha256: of the model's weights, in hexadecimal digits.

    Raises InputError for a text of fewer tokens than `2 HELD_OUT`.
    """
    head, stack = model.heads[HEAD], model.decoder
    assert isinstance(head, VocabularyHead) and stack is not None
    tokens = min(STEP_TOKENS, LOGIT_ELEMENTS // 2 // len(head.weight))
    length = min(seq_len, tokens, len(ids) // HELD_OUT)
    if length < 2:
        raise InputError(f"the text has {len(ids)} tokens, a tuned lens needs at least {2 * HELD_OUT}")
    device = next(model.parameters()).device
    text = torch.tensor(ids, device=device)
    count = len(text) // length
    held = max(1, min(count // HELD_OUT, MOST_HELD_OUT))
    held_BT = text[len(text) - held * length :].view(held, length)
    last_start = len(text) - (held + 1) * length
    layers, width = len(stack.layers), stack.d_model
    weights = [torch.zeros(width, width, device=device, requires_grad=True) for _ in range(layers)]
    biases = [torch.zeros(width, device=device, requires_grad=True) for _ in range(layers)]
    optimizer = torch.optim.Adam([*weights, *biases], lr=LR)
    batch = max(1, tokens // length)
    draws = torch.Generator().manual_seed(SEED)
    before = _kl(model, held_BT, None)
    with work.part("tuned lens", steps, "steps") as part:
        for step in range(steps):
            part.raise_if_stopped("while the lens was trained")
            starts = torch.randint(last_start + 1, (batch,), generator=draws)
            window = torch.stack([text[start : start + length] for start in starts.tolist()])
            with torch.no_grad():
                states_RMD = states_of(model, {"input_ids": window}, SIDE)
                answer = log_probabilities(head, _normalized(model, states_RMD[-1]))
            for states_MD, weight, bias in zip(states_RMD, weights, biases, strict=False):
                moved = states_MD + torch.addmm(bias, states_MD, weight.T)
                own = log_probabilities(head, _normalized(model, moved))
                loss = divergence(answer, own).mean()
                weight.grad, bias.grad = torch.autograd.grad(loss, (weight, bias))
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 - step / steps)
            optimizer.step()
            part.report(step + 1, steps)
    sums = torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)
    tuned = TunedLens(torch.stack(weights).detach(), torch.stack(biases).detach(), before, sums)
    return replace(tuned, kl=torch.stack([before, _kl(model, held_BT, tuned)]))


def _normalized(model: Transformer, states: Tensor) -> Tensor:
    assert model.decoder is not None
    return states if model.decoder.final_norm is None else model.decoder.final_norm(states)


def _kl(model: Transformer, windows_BT: Tensor, tuned: TunedLens | None) -> Tensor:
    """Mean KL of each row but the last, in nats [R]."""
    head, rows = model.heads[HEAD], []
    with inference(model):
        for window_T in windows_BT:
            states_RTD = states_of(model, {"input_ids": window_T.unsqueeze(0)}, SIDE)
            states_RTD = states_RTD if tuned is None else tuned(states_RTD)
            answer = log_probabilities(head, _normalized(model, states_RTD[-1]))
            logs = (log_probabilities(head, _normalized(model, each)) for each in states_RTD[:-1])
            rows.append(torch.stack([divergence(answer, own).mean() for own in logs]))
    return torch.stack(rows).mean(dim=0).cpu()


# --- files ------------------------------------------------------------------------------------------------------------


def file_of(checkpoint: Path) -> Path:
    """The file of a checkpoint's tuned lens: in its run, or beside any other folder."""
    folder = checkpoint.resolve()
    if folder.parent.name == "checkpoints":
        return folder.parent.parent / f"tuned-lens-{folder.name}.safetensors"
    return folder.with_name(f"{folder.name}-tuned-lens.safetensors")


def save(tuned: TunedLens, path: Path) -> None:
    """Write or replace the file of a tuned lens."""
    tensors = {name: value.cpu() for name, value in vars(tuned).items()}
    write_file(path, tensor_chunks(tensors), bytes_needed=file_bytes(tensors))


def read(path: Path, model: Transformer, sha256: str) -> TunedLens:
    """The tuned lens of a file. Raises InputError for a damaged one, and for one of other weights."""
    tensors = read_tensors(path, sha256=None)
    assert model.decoder is not None
    rows, width = len(model.decoder.layers), model.decoder.d_model
    shapes = {"weights": (rows, width, width), "biases": (rows, width), "kl": (2, rows), "sha256": (32,)}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if found != shapes:
        raise InputError(f"{path} is no tuned lens of this model: found {found}, expected {shapes}")
    if bytes(tensors["sha256"].tolist()).hex() != sha256:
        raise InputError(f"{path} was trained for other weights than the model's", hint="train it again: --tuned FILE")
    device = next(model.parameters()).device
    return TunedLens(**{name: value.to(device) for name, value in tensors.items()})
