"""Options of `tformer train`, and the values of the recipe that they set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from tformer.support.bounds import NonNegative, Positive, Seed
from tformer.support.errors import InputError
from tformer.support.options import (
    COMPILE,
    DATA,
    DEVICE,
    DEVICES,
    PRECISION,
    BadRows,
    CommandOnly,
    Delimiter,
    Encoding,
    Json,
    NumberFormat,
    Option,
    Panel,
    Quotes,
    RecipeFile,
    Sets,
    hints_of,
)
from tformer.support.rules import Checked, exclude, needs

MODEL, OBJECTIVE, OPTIMIZER, DISTILLATION = map(Panel, ("Model", "Objective", "Optimizer", "Distillation"))
RUN, MACHINE = Panel("Run"), Panel("Machine")
PRESETS, FOUND = "the preset's", "by name"
ONE_EACH = "a tokenizer for each side; one for both is --tokenizer"

VOCABULARIES: dict[str | None, dict[str, Any]] = {
    None: {},
    "joint": {"tokenizer.separate": False, "tokenizer.source_path": None, "tokenizer.target_path": None},
    "separate": {"tokenizer.separate": True, "model.tie.source_target": False},
}
"""Values of the recipe that --vocabulary sets."""


OBJECTIVE_KINDS = (
    *("causal_lm", "chat", "dpo", "masked_lm", "next_sentence", "replaced_token"),
    *("classification", "multi_label", "regression", "token_classification", "question_answering"),
    *("contrastive", "similarity", "seq2seq", "span_corruption", "denoising"),
)
"""The names in the table of objectives, whose import takes longer than help may."""


@dataclass(frozen=True)
class Key:
    """The key of the recipe that an option sets."""

    path: str


@dataclass(frozen=True)
class TrainOptions(Checked):
    """The options of `tformer train`; None: not given."""

    RULES = (
        exclude("--resume", "--init-from", hint="a resumed run has its own weights"),
        exclude("--tokenizer", ("--source-tokenizer", "--target-tokenizer"), hint="--tokenizer is for both sides"),
        exclude("--vocabulary joint", ("--source-tokenizer", "--target-tokenizer")),
        needs("--source-tokenizer", "--target-tokenizer", hint=ONE_EACH),
        needs("--target-tokenizer", "--source-tokenizer", hint=ONE_EACH),
        needs("--max-restarts", "--devices", hint="torchrun has its own --max-restarts"),
    )

    HELP_ALL = "LoRA, distillation, several machines"

    arch: Annotated[str | None, MODEL("--arch", help="Family, for example gpt or llama.", default="gpt")] = None
    preset: Annotated[
        str | None,
        MODEL("--preset", help="A recipe (config list).", default="by your data or time"),
    ] = None
    config: Annotated[RecipeFile, MODEL] = None
    sets: Annotated[Sets, MODEL] = ()
    init_from: Annotated[
        Path | None, MODEL("--init-from", metavar="RUN", help="Fine-tune this run, checkpoint or Hugging Face folder.")
    ] = None
    lora: Annotated[
        int | None,
        MODEL(
            "--lora",
            metavar="[RANK]",
            help="With --init-from: train adapters of this rank (LoRA) beside the frozen model; 16 if none is given.",
            default="all weights are trained",
            rare=True,
            bare="16",
        ),
        Key("lora.rank"),
    ] = None
    lora_targets: Annotated[
        str | None,
        MODEL(
            "--lora-targets",
            metavar="A,B",
            help="Matrices with an adapter, by name or pattern: q, k, v, out, gate, up, down, decoder.blocks.0.*.",
            default="all of the layers",
            rare=True,
        ),
    ] = None
    lora_weights: Annotated[
        str | None,
        MODEL(
            "--lora-weights",
            metavar="fp32|bf16|int8|int4",
            help="Number format of the frozen matrices in training; int8, int4: QLoRA.",
            default="fp32",
            rare=True,
        ),
        Key("lora.weights"),
    ] = None
    data: Annotated[
        tuple[str, ...],
        DATA(
            "--data",
            metavar="PATH",
            help="Text, csv/xlsx/jsonl/parquet, images, glob, URL, - or builtin:NAME; repeatable.",
            default="built-in data",
        ),
    ] = ()
    valid: Annotated[
        tuple[str, ...], DATA("--valid", metavar="PATH", help="Validation data.", default="a tenth of the data")
    ] = ()
    text_column: Annotated[
        str | None,
        DATA("--text-column", metavar="C", help="Column of the text: name or number.", default=FOUND),
        Key("data.columns.text"),
    ] = None
    text2_column: Annotated[
        str | None,
        DATA("--text2-column", metavar="C", help="Column of the second text.", default=FOUND, rare=True),
        Key("data.columns.text2"),
    ] = None
    label_column: Annotated[
        str | None,
        DATA("--label-column", metavar="C", help="Column of the label or score.", default=FOUND),
        Key("data.columns.label"),
    ] = None
    group_column: Annotated[
        str | None,
        DATA(
            "--group-column",
            metavar="C",
            help="Column of a group, such as an author: its rows are held out together, or none of them.",
            default="no groups",
            rare=True,
        ),
        Key("data.columns.group"),
    ] = None
    labels: Annotated[
        str | None,
        DATA(
            "--labels",
            metavar="A,B",
            help="Names of the labels in the order of their numbers; the data may have either.",
            default="the data's",
            rare=True,
        ),
    ] = None
    source: Annotated[
        tuple[str, ...], DATA("--source", metavar="PATH", help="Source side of aligned text, a sentence per line.")
    ] = ()
    target: Annotated[
        tuple[str, ...], DATA("--target", metavar="PATH", help="Target side, with as many lines as --source.")
    ] = ()
    valid_source: Annotated[
        tuple[str, ...],
        DATA("--valid-source", metavar="PATH", help="Source side of validation data.", default="a tenth"),
    ] = ()
    valid_target: Annotated[
        tuple[str, ...],
        DATA("--valid-target", metavar="PATH", help="Target side of validation data.", default="a tenth"),
    ] = ()
    prefix: Annotated[
        str | None,
        DATA(
            "--prefix",
            help='Pairs: text before every source of --data or --source, for example "translate: ".',
            rare=True,
        ),
    ] = None
    source_column: Annotated[
        str | None,
        DATA(
            "--source-column",
            metavar="C",
            help="Column of the source in a table; several with commas.",
            default=FOUND,
            rare=True,
        ),
        Key("data.columns.source"),
    ] = None
    target_column: Annotated[
        str | None,
        DATA("--target-column", metavar="C", help="Column of the target in a table.", default=FOUND, rare=True),
        Key("data.columns.target"),
    ] = None
    vocabulary: Annotated[
        Literal["joint", "separate"] | None,
        DATA(
            "--vocabulary",
            help="Pairs: one tokenizer for both sides (joint), or one per side (separate).",
            default=PRESETS,
            rare=True,
        ),
    ] = None
    invalid_utf8: Annotated[
        str | None,
        DATA(
            "--invalid-utf8",
            metavar="strict|replace",
            help="Invalid UTF-8: an error (strict), or U+FFFD in its place (replace).",
            default="strict",
            rare=True,
        ),
        Key("data.errors"),
    ] = None
    encoding: Annotated[Encoding, Key("data.encoding")] = None
    delimiter: Annotated[Delimiter, Key("data.delimiter")] = None
    quotes: Annotated[Quotes, Key("data.quotes")] = None
    bad_rows: Annotated[BadRows, Key("data.bad_rows")] = None
    tokenizer: Annotated[
        Path | None, DATA("--tokenizer", metavar="FILE", help="A tokenizer.json.", default="one is trained on the data")
    ] = None
    source_tokenizer: Annotated[
        Path | None,
        DATA(
            "--source-tokenizer",
            metavar="FILE",
            help="Pairs: the tokenizer.json of the source, beside --target-tokenizer.",
            rare=True,
        ),
    ] = None
    target_tokenizer: Annotated[
        Path | None,
        DATA("--target-tokenizer", metavar="FILE", help="Pairs: the tokenizer.json of the target.", rare=True),
    ] = None
    embeddings: Annotated[
        Path | None,
        MODEL(
            "--embeddings",
            metavar="FILE",
            help="Start the embedding table with the token vectors of this file: GloVe's or word2vec's text format, or "
            "safetensors.",
            default="random vectors",
            rare=True,
        ),
        Key("embeddings.path"),
    ] = None
    target_embeddings: Annotated[
        Path | None,
        MODEL(
            "--target-embeddings",
            metavar="FILE",
            help="Pairs: token vectors of the target side. If source and target share a table, used for tokens missing "
            "in --embeddings.",
            default="random vectors",
            rare=True,
        ),
        Key("embeddings.target_path"),
    ] = None
    objective: Annotated[
        str | None,
        OBJECTIVE(
            "--objective",
            metavar="NAME",
            help=f"{', '.join(OBJECTIVE_KINDS)}. Commas join several.",
            default=PRESETS,
        ),
    ] = None
    pooling: Annotated[
        str | None,
        OBJECTIVE(
            "--pooling",
            metavar="cls|mean|max|eos|attention",
            help="Classifiers: one vector per example from the first position (cls), the last (eos), the mean or "
            "maximum of all (mean, max) or a learned mean (attention); padding never counts.",
            default=PRESETS,
            rare=True,
        ),
        Key("model.heads.*.pooling"),
    ] = None
    out: Annotated[Path | None, RUN("--out", metavar="DIR", help="Run directory.", default="runs/ARCH-PRESET-N")] = None
    resume: Annotated[bool, RUN("--resume", help="Continue the run in --out, or the newest; else start.")] = False
    max_steps: Annotated[
        Positive | None,
        RUN("--max-steps", help="Steps in all, resumed ones too.", default=PRESETS),
        Key("training.max_steps"),
    ] = None
    max_epochs: Annotated[
        float | None,
        RUN("--max-epochs", help="Passes over the training data.", default=PRESETS),
        Key("training.max_epochs"),
    ] = None
    minutes: Annotated[
        float | None,
        RUN(
            "--minutes",
            metavar="N",
            help="Minutes in all; they also choose the size.",
            default="2 without --preset and length, unless the data sets it",
        ),
        Key("training.minutes"),
    ] = None
    max_minutes: Annotated[
        float | None,
        RUN(
            "--max-minutes",
            help="Save and stop after this time; the learning-rate schedule stays the same.",
            default="no limit",
            rare=True,
        ),
        Key("training.max_minutes"),
    ] = None
    stop_at_step: Annotated[
        Positive | None,
        RUN(
            "--stop-at-step",
            metavar="N",
            help="Validate, save and stop at this step; the learning-rate schedule stays the same.",
            rare=True,
        ),
    ] = None
    folds: Annotated[
        int | None, RUN("--folds", metavar="K", help="Cross-validate: K trainings, each tested on its part.")
    ] = None
    best_metric: Annotated[
        str | None,
        RUN(
            "--best-metric",
            metavar="NAME",
            help="Chooses the best checkpoint: loss, accuracy, f1_macro, f1_binary, mcc, bleu ...",
            default=PRESETS,
        ),
        Key("training.best_metric"),
    ] = None
    early_stopping: Annotated[
        int | None,
        RUN("--early-stopping", metavar="N", help="Validations without a gain.", default=PRESETS),
        Key("training.early_stopping.patience"),
    ] = None
    log_to: Annotated[
        tuple[str, ...],
        RUN(
            "--log-to",
            metavar="NAME",
            help="Log to tensorboard or wandb as well; repeatable, or separated by commas. A resumed run continues "
            "its logs.",
            rare=True,
        ),
    ] = ()
    full_validation: Annotated[
        bool,
        RUN(
            "--full-validation",
            help="Validate on all held-out data, also where that takes long beside the training.",
            rare=True,
        ),
    ] = False
    dry_run: Annotated[
        bool,
        RUN("--dry-run", help="Show recipe, memory and a first batch; do not train."),
        CommandOnly("the command shows it: tformer train --dry-run"),
    ] = False
    as_json: Annotated[Json, RUN] = False
    batch_size: Annotated[
        Positive | None,
        OPTIMIZER("--batch-size", help="Sequences per forward pass.", default=PRESETS),
        Key("training.batch_size"),
    ] = None
    batch_tokens: Annotated[
        int | None,
        OPTIMIZER(
            "--batch-tokens",
            help="Maximum tokens per forward pass, instead of --batch-size; pairs count their longer side.",
            default=PRESETS,
            rare=True,
        ),
        Key("training.batch_tokens"),
    ] = None
    grad_accum: Annotated[
        int | None,
        OPTIMIZER("--grad-accum", help="Forward passes per step.", default=PRESETS),
        Key("training.grad_accum"),
    ] = None
    lr: Annotated[float | None, OPTIMIZER("--lr", help="Peak learning rate.", default=PRESETS), Key("optimizer.lr")] = (
        None
    )
    seed: Annotated[Seed | None, OPTIMIZER("--seed", help="Random seed.", default=PRESETS), Key("seed")] = None
    teacher: Annotated[
        Path | None,
        DISTILLATION(
            "--teacher",
            metavar="RUN",
            help="Learn from this run, checkpoint or Hugging Face folder. The new model takes the teacher's tokenizer.",
            default="no teacher",
            rare=True,
        ),
        Key("teacher.path"),
    ] = None
    distil: Annotated[
        str | None,
        DISTILLATION(
            "--distil",
            metavar="soft|sequence",
            help="soft: learn the teacher's probabilities. sequence (encoder-decoders): learn the teacher's "
            "translations.",
            default="soft",
            rare=True,
        ),
        Key("teacher.kind"),
    ] = None
    precision: Annotated[
        NumberFormat | None,
        replace(PRECISION, help="Number format of the computation; auto: the fastest here.", default=PRESETS),
        MACHINE,
        Key("training.precision"),
    ] = None
    device: Annotated[str | None, replace(DEVICE, default="auto"), MACHINE, Key("training.device")] = None
    compile: Annotated[str | None, replace(COMPILE, default=PRESETS), MACHINE, Key("training.compile")] = None
    workers: Annotated[
        Positive | None,
        MACHINE(
            "--workers",
            metavar="N",
            help="Processes that tokenize a text.",
            default="one for each processor",
            rare=True,
        ),
    ] = None
    devices: Annotated[
        str | None, replace(DEVICES, help="Processes; auto: one for each GPU.", default="one", rare=False), MACHINE
    ] = None
    parallel: Annotated[
        str | None,
        MACHINE(
            "--parallel",
            metavar="ddp|fsdp",
            help="ddp: a full copy of the model per device. fsdp: split over all devices.",
            default="ddp",
            rare=True,
        ),
        Key("training.parallel.kind"),
    ] = None
    max_restarts: Annotated[
        NonNegative,
        MACHINE(
            "--max-restarts",
            metavar="N",
            help="With --devices: how often to go on from the last checkpoint when a process is killed or fails.",
            rare=True,
        ),
    ] = 0

    def resuming(self, run: Path) -> TrainOptions:
        """The options that go on with a run of these options: everything else is in its recipe."""
        return TrainOptions(
            out=run,
            resume=True,
            max_minutes=self.max_minutes,
            stop_at_step=self.stop_at_step,
            log_to=self.log_to,
            as_json=self.as_json,
            device=self.device,
            workers=self.workers,
            devices=self.devices,
        )

    @property
    def named(self) -> tuple[str | None, str | None]:
        """(arch, preset); `--preset ARCH/NAME` names both."""
        if self.preset is not None and "/" in self.preset:
            arch, _, preset = self.preset.partition("/")
            return arch, preset
        return self.arch, self.preset

    def recipe_values(self) -> dict[str, Any]:
        """The values of the recipe that the options set, by dotted key.

        Raises InputError for options that contradict each other.
        """
        from tformer.data.sources.columns import parse_column
        from tformer.support.processes import most_processes

        self.check()
        if self.workers is not None and self.workers > most_processes():
            raise InputError(f"--workers must be at most {most_processes()} on this machine, found {self.workers}")
        values: dict[str, Any] = {"training.valid_share": 1.0} if self.full_validation else {}
        for name, hint in hints_of(TrainOptions).items():
            value = getattr(self, name)
            for fact in hint.__metadata__:
                if isinstance(fact, Key) and value is not None:
                    is_column = fact.path.startswith("data.columns.")
                    plain = str(value) if isinstance(value, Path) else value
                    values[fact.path] = parse_column(plain) if is_column else plain
        if self.labels is not None:
            values["data.labels"] = [name.strip() for name in self.labels.split(",")]
        if self.lora_targets is not None:
            values["lora.targets"] = [pattern.strip() for pattern in self.lora_targets.split(",")]
        if self.objective is not None:
            values["objectives"] = [{"kind": kind.strip()} for kind in self.objective.split(",")]
        return values | self._data_values() | self._vocabulary_values()

    def _data_values(self) -> dict[str, Any]:
        """Entries of the recipe's data section."""
        entries = {
            "data.train": _entries(self.data, self.source, self.target, "--source and --target"),
            "data.valid": _entries(
                self.valid, self.valid_source, self.valid_target, "--valid-source and --valid-target"
            ),
        }
        if self.prefix is not None and not any(entries.values()):
            raise InputError(
                "--prefix applies to sources that --data, --source or --valid name, found none of these",
                hint="of a recipe's own data: --set 'data.train.0.prefix=TEXT'",
            )
        added = {} if self.prefix is None else {"prefix": self.prefix}
        return {key: [entry | added for entry in found] for key, found in entries.items() if found}

    def _vocabulary_values(self) -> dict[str, Any]:
        """One vocabulary or two. A tokenizer file for each side means two."""
        if self.source_tokenizer is None:
            path = {} if self.tokenizer is None else {"tokenizer.path": str(self.tokenizer)}
            return VOCABULARIES[self.vocabulary] | path
        return VOCABULARIES["separate"] | {
            "tokenizer.path": None,
            "tokenizer.source_path": str(self.source_tokenizer),
            "tokenizer.target_path": str(self.target_tokenizer),
        }


def train_flags() -> dict[str, str]:
    """{flag: name of the field} of every option of `tformer train`."""
    hints = hints_of(TrainOptions)
    return {
        flag: field.name
        for field in fields(TrainOptions)
        for fact in hints[field.name].__metadata__
        if isinstance(fact, Option)
        for flag in fact.flags
    }


def read_words(words: Sequence[str]) -> TrainOptions:
    """The options that words of a command line give, as `tformer train` would read them. Unknown flags are left out."""
    from tformer.recipe.yaml_text import resolve_scalar

    names, hints = train_flags(), get_type_hints(TrainOptions)
    values: dict[str, Any] = {}
    for word, after in zip_longest(words, words[1:]):
        flag, equals, given = word.partition("=")
        name = names.get(flag)
        text = given if equals else None if after is None or after.startswith("--") else after
        if name is None or text is None:
            continue
        if hints[name] == tuple[str, ...]:
            values[name] = (*values.get(name, ()), text)
        elif Path in get_args(hints[name]):
            values[name] = Path(text)
        else:
            values[name] = text if str in get_args(hints[name]) else resolve_scalar(text)
    return TrainOptions(**values)


def _entries(paths: Sequence[str], sources: Sequence[str], targets: Sequence[str], names: str) -> list[dict[str, str]]:
    """Entries of the recipe's data section. Raises InputError for one side of aligned files without the other."""
    if len(sources) != len(targets):
        raise InputError(f"{names} come in pairs, found {len(sources)} and {len(targets)}")
    aligned = [{"path": path, "target_path": target} for path, target in zip(sources, targets, strict=True)]
    return [*({"path": path} for path in paths), *aligned]
