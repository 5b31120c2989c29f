"""The sections `data`, `optimizer`, `schedule`, `training` and `generation` of a recipe, and their base class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tformer.data.sources.augmentation import AugmentationName
from tformer.data.sources.conversations import FormatName
from tformer.data.sources.reading import Reading
from tformer.metrics import Metric
from tformer.nn.lora import BaseFormat
from tformer.optim.optimizers import OptimizerName
from tformer.optim.schedules import ScheduleName
from tformer.support import decoding as row
from tformer.support.formatting import python_value

# Ceilings above anything that can be trained, so that no recipe makes a command run or allocate without end.
MAX_LAYERS = 1024
MAX_SIZE = 2**20  # of a dimension of the model
MAX_BATCH = 2**30

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
BatchSize = Annotated[int, Field(gt=0, le=MAX_BATCH)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, lt=1)]


OF_DATA, OF_MACHINE = "of the data", "of the machine"
"""Facts of fields: a training of the same recipe on other data, or on another machine, has other values of these."""


class Section(BaseModel):
    """Base class of sections: unknown keys are errors, values are frozen, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with these values, without validation; numbers of numpy become Python's."""
        plain = {name: python_value(value) for name, value in (update or {}).items()}
        return super().model_copy(update=plain, deep=deep)


class Columns(Section):
    """Columns of tables: names, or numbers counted from 0."""

    text: str | int | None = None  # the text
    text2: str | int | None = None  # the second text of a pair
    label: str | int | None = None  # the label or score
    group: str | int | None = None  # rows of one group are held out together, or not at all (labelled examples)
    source: str | int | None = None  # the source of a translation
    target: str | int | None = None  # its reference: the right translation


class SourceSpec(Section):
    """One source of data: a file, folder or glob, `-` for standard input, or `builtin:NAME`."""

    path: str  # file, folder, glob, `-` or builtin:NAME
    target_path: str | None = None  # the other side of aligned files
    # mixture weight; if all are null, proportional to the tokens (pairs: to their number)
    weight: PositiveFloat | None = None
    prefix: str = ""  # text before every source
    task: str | None = None  # name in reports


class Data(Section):
    """Training and validation data, and how examples become batches."""

    # where the relative paths of a run start: the folder in which its training was started; null: the current one
    folder: Annotated[str | None, OF_DATA] = None
    train: Annotated[tuple[SourceSpec, ...], OF_DATA] = ()  # empty: the built-in source of the objective
    valid: Annotated[tuple[SourceSpec, ...], OF_DATA] = ()  # empty: `valid_fraction` of the training data, fixed
    # share of the training data that is used, drawn by the seed with the share of every class (running text: one part)
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    valid_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1  # share held out for validation
    # cross-validation (train --folds) of labelled examples: the number of parts of the training data; null: none
    folds: Annotated[Annotated[int, Field(ge=2, le=1000)] | None, OF_DATA] = None
    # with folds, the part (1 ... folds) that is left out of the training, and that `evaluate` reads
    fold: Annotated[Positive, OF_DATA] = 1
    columns: Annotated[Columns, OF_DATA] = Columns()
    # of conversations (objective chat): the keys of their rows; null: found in each row
    format: Annotated[FormatName | None, OF_DATA] = None
    # what to do with invalid UTF-8: stop with an error, or put U+FFFD in its place
    errors: Literal["strict", "replace"] = "strict"
    encoding: str | None = None  # of text, such as utf-8, latin-1, utf-16; null: found in tables, else utf-8
    delimiter: str | None = None  # what separates the cells of csv: a character, or tab; null: found
    quotes: Literal["cells", "text"] | None = None  # of csv, around cells or text; null: cells, if no doubt
    bad_rows: Literal["error", "drop"] = "error"  # rows of tables that cannot be used: an error, or left out
    # how texts fill windows; none: one document per example, padded
    packing: Literal["concat", "documents", "none"] = "concat"
    document_mask: bool = False  # packed documents do not see each other
    padding: Literal["right", "left", "random"] = "right"  # side of the padding; random: drawn for each text
    pad_to: Literal["longest", "max"] = "longest"  # width of a batch: its longest example, or always seq_len
    seq_len: Positive | None = None  # maximum number of tokens of an example; null: model.max_seq_len
    sort_window: NonNegative = 0  # examples are sorted by length inside windows of this many; 0: not sorted
    target_seq_len: Positive | None = None  # pairs: maximum number of tokens of the target; null: seq_len
    overlong: Literal["drop", "truncate"] = "drop"  # pairs longer than that: leave them out, or cut them
    # drop pairs whose longer side has more than this many times the tokens of the shorter; null: none
    max_length_ratio: PositiveFloat | None = None
    labels: Annotated[tuple[str, ...], OF_DATA] = ()  # names of the labels in order; empty: found in the data
    label_separator: str = "|"  # what stands between the labels of one example (multi_label)
    truncation: Literal["head", "tail", "head_tail"] = "head"  # the part of a text longer than seq_len that is used
    # labelled examples without data.valid: hold out a fixed sample with every label's share, or the last ones
    valid_split: Literal["stratified", "last"] = "stratified"
    image_mean: tuple[float, ...] = ()  # mean per channel, of values in [0, 1]; empty: the training images'
    image_std: tuple[float, ...] = ()  # standard deviation per channel; empty: the training images'
    # new segmentations of the training texts in every epoch; 0: off. bpe: share of merges left out (BPE-dropout, arXiv
    # 1910.13267); unigram: exponent of the probabilities by which pieces are drawn (arXiv 1804.10959)
    subword_sampling: Probability = 0.0
    # random changes of training images, in this order; randaugment: arXiv 1909.13719, erase: arXiv 1708.04896
    augment: tuple[AugmentationName, ...] = ()

    @property
    def reading(self) -> Reading:
        """The settings for reading files. Raises InputError for an unknown encoding or delimiter."""
        return Reading(self.errors, self.encoding, self.delimiter, self.bad_rows, self.quotes)


class ParameterGroup(Section):
    """Overrides for the parameters whose names match a glob, for example `embedding.*`."""

    match: str  # names of parameters, with * and ?
    lr_scale: NonNegativeFloat = 1.0  # factor of the learning rate
    weight_decay: NonNegativeFloat | None = None  # null: the optimizer's
    frozen: bool = False  # not trained


class Optimizer(Section):
    """The optimizer; `lr` is the maximum rate. With `muon` it is for the hidden matrices, `adam_lr` for all others."""

    kind: OptimizerName = "adamw"
    lr: PositiveFloat = 3.0e-4  # maximum learning rate
    adam_lr: PositiveFloat | None = None  # muon, normuon: the rate of all other parameters; null: lr
    betas: tuple[Probability, Probability] = (0.9, 0.95)  # decay of the moving averages
    eps: PositiveFloat = 1.0e-8  # added to the root of the second moment
    weight_decay: NonNegativeFloat = 0.1  # matrices only: never biases, gains and tables of one dimension
    momentum: Probability = 0.95  # muon, normuon: momentum of the gradient
    clip_grad_norm: PositiveFloat | None = 1.0  # maximum norm of the gradient (arXiv 1211.5063); null: off
    groups: tuple[ParameterGroup, ...] = ()  # exceptions by name of the parameter
    # factor of the learning rate per layer, counted from the top (arXiv 1801.06146)
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None


SchedulePoint = tuple[Positive, Annotated[float, Field(ge=0, le=1)]]
"""(number of finished steps, factor of the learning rates after them)."""


class Schedule(Section):
    """The learning-rate schedule, a factor on the optimizer's rates; every kind has `warmup_steps`."""

    kind: ScheduleName = "cosine"
    # timed: (finished steps, factor) that straight lines connect; null: the clock has not decided yet
    points: tuple[SchedulePoint, ...] | None = None
    warmup_steps: NonNegative = 0  # steps in which the rate grows from 0 to lr
    warmup_ratio: Probability = 0.0  # share of the steps that warm up, where warmup_steps is 0
    decay_steps: Positive | None = None  # step after which the rate is at its floor; null: training.max_steps
    # floor of cosine, linear, wsd, timed and plateau, as a share of lr; all but plateau reach it after the last step
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2  # wsd, timed: the share of the steps in which it decays
    # plateau: factor of the rate after too many validations without a better loss
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.8
    patience: NonNegative = 3  # plateau: more validations than this without a better loss lower the rate


class LoraBase(Section):
    """The model whose weights the adapters change."""

    path: str  # a checkpoint, or a Hugging Face folder
    sha256: str  # of its weight file, or of the list of these where there are several


class Lora(Section):
    """Low-rank adapters of a frozen base (arXiv 2106.09685), which are trained and saved without it."""

    rank: Annotated[int, Field(gt=0, le=MAX_SIZE)] = 16  # of the change of each matrix
    alpha: PositiveFloat = 32.0  # the change is scaled by alpha / rank
    rslora: bool = False  # by alpha / sqrt(rank) instead (arXiv 2312.03732)
    dora: bool = False  # also learn the length of each row (arXiv 2402.09353)
    dropout: Probability = 0.0  # of what the adapters read
    # patterns of matrices, such as q, v, self_attention.*, decoder.blocks.0.*; empty: all inside the stacks
    targets: tuple[str, ...] = ()
    # patterns of parameters that are trained in full, beside heads that are new or tell labels
    train: tuple[str, ...] = ()
    weights: BaseFormat = "fp32"  # number format of the frozen matrices in training (QLoRA, arXiv 2305.14314)
    base: LoraBase | None = None  # set by train --init-from

    @property
    def scale(self) -> float:
        """The factor of the change."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class EarlyStopping(Section):
    """Stop after `patience` validations without a better `training.best_metric`, or a lower loss where it is equal."""

    patience: Positive = 5  # number of validations without improvement


class Parallelism(Section):
    """Settings of several processes (`train --devices`); one process reads none of them."""

    # ddp: each process holds all weights; fsdp: a part of them (arXiv 2304.11277)
    kind: Literal["ddp", "fsdp"] = "ddp"
    reshard: bool = True  # fsdp: free the weights of a layer after its forward pass
    # number format in which gradients are added up over the processes; bf16: half the traffic, 8 bits of each sum
    reduce: Literal["fp32", "bf16"] = "fp32"
    timeout_minutes: Annotated[float, Field(gt=0, le=1e6)] = 10.0  # limit of waiting for the other processes


BATCH_SIZES = ("batch_size", "batch_tokens")
"""Keys of `training` of which one excludes the other."""


class Training(Section):
    """Length, batches, validation, checkpoints and precision of the training."""

    max_steps: Positive = 10000  # optimizer steps
    max_epochs: PositiveFloat | None = None  # passes over the data, instead of max_steps, which then follows from them
    # train for this time, all of the command included: the clock decides when the rate decays, and the last step
    minutes: PositiveFloat | None = None
    max_minutes: PositiveFloat | None = None  # save and stop after this number of minutes
    batch_size: BatchSize | None = 32  # examples or windows in one micro-batch
    # tokens in one micro-batch, instead of batch_size; pairs count their longer side
    batch_tokens: BatchSize | None = None
    grad_accum: BatchSize = 1  # micro-batches per optimizer step
    # steps between validations, below 1 a share of all steps; null: each epoch, at most 20 times in total; without
    # max_epochs also every 500 steps
    eval_every: Positive | Share | None = 500
    # steps between checkpoints, below 1 a share of all steps; null: with every validation
    save_every: Positive | Share | None = 500
    save_every_minutes: PositiveFloat | None = None  # also save at this interval in minutes
    # write checkpoints from a copy of all tensors while training goes on; null: where several processes train
    save_in_background: bool | None = None
    keep_last: Positive = 2  # number of checkpoints kept besides the best
    log_every: Positive = 10  # steps between log lines
    sample_every: NonNegative | None = None  # steps between sample texts; null: with every validation; 0: never
    early_stopping: EarlyStopping | None = None  # null: off
    # decides which checkpoint is the best, and when training stops early; f1_binary: F1 of the second of two labels
    best_metric: Metric = "loss"
    # share of the held-out data that validations in training read, evenly spread; null: all of it, or as much as takes
    # a fifth of the operations of the training
    valid_share: Annotated[float, Field(gt=0, le=1)] | None = None
    # at the end, measure the best checkpoint on all held-out data, where validations read a share; null: unless that
    # share was asked for. Never in a training by minutes
    final_validation: bool | None = None
    valid_beam_size: NonNegative = 1  # pairs: beam size of validation; 1: greedy, 0: no decoding
    valid_sentences: Positive | None = None  # pairs: number of those that a validation decodes; null: all it reads
    ema_decay: Probability | None = None  # decay of averaged weights, which are validated and saved; null: off
    activation_checkpointing: bool = False  # recompute activations to save memory (arXiv 1604.06174)
    # number format of the computation (arXiv 1710.03740)
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], OF_MACHINE] = "auto"
    # use torch.compile; auto: on a GPU, for 5,000 steps or more
    compile: Annotated[Literal["auto", "on", "off"], OF_MACHINE] = "auto"
    parallel: Parallelism = Parallelism()  # several processes
    device: Annotated[str, OF_MACHINE] = "auto"  # where the model runs: auto, cpu, cuda or cuda:N
    # CPU threads, which several processes on a machine share; null: PyTorch's choice
    threads: Annotated[Annotated[int, Field(gt=0, le=4096)] | None, OF_MACHINE] = None

    @model_validator(mode="after")
    def _has_one_batch_size(self) -> Training:
        if (self.batch_size is None) == (self.batch_tokens is None):
            found = "neither" if self.batch_size is None else f"{self.batch_size} and {self.batch_tokens}"
            raise ValueError(f"batch_size and batch_tokens: found {found}, expected one of the two (the other null)")
        return self


class Generation(Section):
    """Defaults of `tformer generate` for this model; flags override them."""

    max_new_tokens: row.MaxNewTokens = 200  # maximum length of an output
    temperature: row.Temperature = 1.0  # divides the logits before sampling; 0: greedy
    top_k: row.TopK = 0  # sample from this many most probable tokens; 0: off
    top_p: row.TopP = 1.0  # nucleus sampling (arXiv 1904.09751); 1: off
    min_p: row.MinP = 0.0  # minimum probability, as a share of the highest (arXiv 2407.01082); 0: off
    repetition_penalty: row.RepetitionPenalty = 1.0  # makes used tokens less likely (arXiv 1909.05858); 1: off
    no_repeat_ngram: row.NoRepeatNgram = 0  # never repeat a sequence of this many tokens (arXiv 1705.04304); 0: off
    min_new_tokens: row.MinNewTokens = 0  # minimum length of an output
    # at the maximum length: cut the text, or end it with eos, whose probability counts
    at_limit: row.AtLimit = "cut"
    length_margin: row.LengthMargin | None = None  # encoder-decoders: maximum tokens beyond the source's
    beam_size: row.BeamSize = 1  # hypotheses kept at every step; 1: no beam search
    length_penalty: row.LengthPenalty = 1.0  # exponent A of the divisor of a log-probability; higher: longer texts
    # divisor: gnmt ((5 + length)/6)^A (arXiv 1609.08144); avg length^A; none 1
    length_penalty_type: row.LengthPenaltyType = "avg"
    # when a beam search ends. beam: beam_size hypotheses have finished; heuristic: also no unfinished one scores higher
    # than the worst finished one; exhaustive: none can score higher any more
    stopping: row.Stopping = "heuristic"
    suppress_tokens: tuple[NonNegative, ...] | None = None  # ids never generated; null: pad and those at the start
    stop: row.Stop = ()  # texts that end an output
    stop_tokens: tuple[NonNegative, ...] = ()  # further ids that end a text (Llama 3 has several)
