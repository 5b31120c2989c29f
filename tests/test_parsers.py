"""Every parser reads or refuses any content: a value, or an error of input, soon, and never another exception.

`CORPUS` holds contents that a parser once met with another exception, or was slow at.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.fakes import Columns, Spec
from tests.parser_fuzzing import answer, damaged
from tests.quick import first_is_quick
from tformer.bench.options import whole_numbers
from tformer.checkpoint.run import RunDirectory
from tformer.cli.export import parse_bytes
from tformer.cli.tokenize import parse_ids
from tformer.data.shards.array_files import ArrayFile
from tformer.data.shards.token_files import ArrayWriter, DamagedShardError
from tformer.data.sources.columns import parse_column
from tformer.data.sources.image_files import find_images, open_idx
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.pairs import open_pairs
from tformer.data.sources.text import open_sources
from tformer.decoding.lines import line_blocks
from tformer.interop.read_model import read_model
from tformer.interop.slow_tokenizers import convert_slow
from tformer.interop.tokenizer_config import read_tokenizer_config
from tformer.recipe import load_recipe, yaml_text
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.support.options import parse_numbers
from tformer.support.shipped import preset_path
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.viz.plot.series import read_runs
from tformer.workflows.runs.summary import best_of, number, read_logged
from tformer.workflows.sweep.plan import parse_vary, read_plan

quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Parser(NamedTuple):
    """A parser of files.

    Attributes:
        file: name of the file; its ending decides on its format.
        read: reads it whole.
        valid: contents that it reads.
    """

    file: str
    read: Callable[[Path], object]
    valid: Sequence[bytes]


def read_documents(path: Path) -> object:
    sources = open_sources([Spec(str(path), weight=1.0)], columns=Columns())
    return [piece for source in sources for piece in source.documents()]


def read_labelled(path: Path) -> object:
    return [
        list(source.rows())
        for needs_label in (True, False)
        for source in open_labelled([Spec(str(path))], columns=Columns(), needs_label=needs_label)  # type: ignore[list-item]
    ]


def read_pairs(path: Path) -> object:
    return [list(source.rows()) for source in open_pairs([Spec(str(path))], columns=Columns())]


def read_aligned(path: Path) -> object:
    target = path.with_name("target.txt")
    target.write_text("eins\nzwei\n")
    return [list(source.rows()) for source in open_pairs([Spec(str(path), str(target))], columns=Columns())]


def read_lines(path: Path) -> object:
    return list(line_blocks(str(path), errors="strict", size=3))


def read_images(path: Path) -> object:
    found = find_images(path, needs_label=True)
    return [found.read(number) for number in range(len(found.places))]


def read_idx(path: Path) -> object:
    labels = path.with_name("labels-idx1-ubyte")
    labels.write_bytes(struct.pack(">II", 2049, 2) + b"\0\1")
    return open_idx(path, needs_label=True)


def use_tokenizer(path: Path) -> object:
    tokenizer = Tokenizer.load(path)
    return tokenizer.decode(tokenizer.encode("a cat é\n")), tokenizer.sha256


def read_config_json(path: Path) -> object:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.with_name("model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return read_model(path.parent)


def convert_vocabulary(path: Path) -> object:
    for name, content in VOCABULARY.items():
        if name != path.name and (path.name == "vocab.txt") == (name == "vocab.txt"):
            path.with_name(name).write_bytes(content)
    model_type = "bert" if path.name == "vocab.txt" else "gpt2"
    return convert_slow(read_tokenizer_config(path.parent), {"model_type": model_type})


def read_metrics(path: Path) -> object:
    logged = read_logged(RunDirectory(path.parent))
    for records in logged.splits.values():
        for record in records.values():
            [number(record, key) for key in record]
    return best_of(logged, None), read_runs([path.parent])


def archive() -> bytes:
    image, data = io.BytesIO(), io.BytesIO()
    Image.new("L", (2, 2)).save(image, "PNG")
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("cats/1.png", image.getvalue())
        file.writestr("dogs/2.png", image.getvalue())
    return data.getvalue()


def parquet() -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    data = io.BytesIO()
    write_table(pyarrow.table({"text": ["one", "two"], "label": ["a", "b"]}), data)
    return data.getvalue()


def tokenizers() -> list[bytes]:
    options = [TokenizerOptions(model=model, vocab_size=300) for model in ("byte-bpe", "wordpiece", "char")]
    return [train_tokenizer(lambda: iter(["a cat and a dog\n"]), each).to_json().encode() for each in options]


CONFIGS = [
    {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 8, "n_inner": None},
    {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
     "vocab_size": 9, "max_position_embeddings": 8, "type_vocab_size": 2, "hidden_act": "gelu", "id2label": {"0": "a"}},
    {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9,
     "intermediate_size": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}},
    {"model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 9,
     "relative_attention_num_buckets": 8, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
]  # fmt: skip
VOCABULARY = {
    "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\ncat\n##s\n",
    "vocab.json": b'{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}',
    "merges.txt": b"#version: 0.2\na b\n",
}
METRICS = b"".join(
    json.dumps(record).encode() + b"\n"
    for record in (
        {"split": "train", "step": 1, "loss": 2.5, "tokens": 64, "seconds": 0.5},
        {"split": "valid", "step": 1, "loss": 2.25, "is_best": True},
        {"split": "train", "step": 2, "loss": 2.0, "tokens": 128, "seconds": 1.0},
    )
)
TEXT = "one two\r\ndrei é\n\n\u2028x\ry\n".encode()
TABLES = {
    "csv": [b'text,label\n"a, b",x\nc,y\n', b"1,hello\n2,there\n3,you\n"],
    "tsv": [b"text\tlabel\none\ta\ntwo\tb\n", b"source\ttarget\none\teins\ntwo\tzwei\n"],
    "jsonl": [b'{"text": "one", "label": 1}\n{"text": "two", "label": 2.5}\n', b'{"source": "a", "target": "b"}\n'],
    "": [b'{"text": "one", "label": "a"}\n', b"one\ta\ntwo\tb\n", b"one\ntwo\n"],
}
PRESETS = [
    preset_path(arch, preset).read_bytes() for arch, preset in (("gpt", "char-cpu"), ("bert", "pairs"), ("t5", "tiny"))
]
PLAN = b"""name: plan
seeds: 2
tasks:
  - name: one
    arch: gpt
    set: {model.d_model: 32}
    vary: {"optimizer.lr": [1e-3, 1e-4], "model.decoder.norm.place,model.decoder.norm.kind": [[pre, rmsnorm]]}
    evaluate: {test: [--data, "a b"]}
"""
PARSERS = {
    "a recipe": Parser("recipe.yaml", lambda path: load_recipe(config=path), PRESETS),
    "the recipe of a run": Parser("recipe.yaml", lambda path: RunDirectory(path.parent).recipe(), PRESETS),
    "the plan of a sweep": Parser("plan.yaml", lambda path: read_plan(str(path)), [PLAN]),
    "a text": Parser("text.txt", read_documents, [TEXT]),
    "a text in gzip": Parser("text.txt.gz", read_documents, [gzip.compress(TEXT, mtime=0)]),
    "lines": Parser("lines.txt", read_lines, [TEXT]),
    "aligned lines": Parser("source.txt", read_aligned, [b"one\ntwo\n"]),
    **{
        f"{what} in {ending or 'an unnamed format'}": Parser(f"table.{ending}".rstrip("."), read, valid)
        for ending, valid in TABLES.items()
        for what, read in (("texts", read_documents), ("labelled rows", read_labelled), ("pairs", read_pairs))
    },
    "images in IDX": Parser("images-idx3-ubyte", read_idx, [struct.pack(">IIII", 2051, 2, 2, 2) + bytes(8)]),
    "images in a zip": Parser("images.zip", read_images, [archive()]),
    "metrics": Parser("metrics.jsonl", read_metrics, [METRICS]),
    "config.json": Parser("config.json", read_config_json, [json.dumps(config).encode() for config in CONFIGS]),
    **{name: Parser(name, convert_vocabulary, [content]) for name, content in VOCABULARY.items()},
}  # fmt: skip


def tried(parser: Parser, folder: Path, content: bytes) -> Any:
    path = folder / parser.file
    path.write_bytes(content)
    return answer(lambda: parser.read(path))


@pytest.mark.parametrize("name", PARSERS)
def test_valid_content_is_read(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    needs_weights = (
        "weights disagree"  # config.json is read to its end: only then the weights of this folder are missed
    )
    for content in parser.valid:
        found = tried(parser, tmp_path, content)
        fits = not isinstance(found, InputError) or needs_weights in found.message
        assert fits or parser.file.startswith("table"), found


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
@quick
def test_any_content_is_read_or_refused_in_one_line(name: str, data: st.DataObject, tmp_path: Path) -> None:
    parser = PARSERS[name]
    tried(parser, tmp_path, data.draw(damaged(parser.valid)))


@given(data=st.data())
@quick
def test_any_tokenizer_json_is_used_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    tried(Parser("tokenizer.json", use_tokenizer, ()), tmp_path, data.draw(damaged(tokenizers())))


@given(data=st.data())
@quick
def test_any_parquet_file_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    for read in (read_documents, read_labelled):
        tried(Parser("table.parquet", read, ()), tmp_path, data.draw(damaged([parquet()])))


@given(data=st.data())
@quick
def test_a_damaged_file_of_tokens_is_never_loaded(data: st.DataObject, tmp_path: Path) -> None:
    dtype, tokenizer, path = np.dtype("uint16"), bytes(range(32)), tmp_path / "tokens-00000.bin"
    path.unlink(missing_ok=True)
    writer = ArrayWriter(path, dtype)
    writer.append(np.arange(50))
    writer.finish(tokenizer=tokenizer)
    valid = path.read_bytes()
    path.write_bytes(data.draw(damaged([valid])))
    try:
        array = ArrayFile(path, dtype, tokenizer=tokenizer).load()
    except DamagedShardError:
        return
    assert array.tolist() == list(range(50))


OPTIONS: dict[str, tuple[Callable[[str], object], list[bytes]]] = {
    "--shard-size": (parse_bytes, [b"5GB", b"1.5 MiB", b"1000"]),
    "--ids": (parse_ids, [b"[1, 2, 3]", b"12 7 345"]),
    "--layers": (lambda text: parse_numbers(text, "--layers"), [b"0,3-5", b"1"]),
    "--lengths": (lambda text: whole_numbers("--lengths", text, least=1, most=4096), [b"128,512"]),
    "--text-column": (parse_column, [b"text", b"0", b"1,2"]),
    "--device": (resolve_device, [b"auto", b"cpu", b"cuda:0"]),
    "--vary": (parse_vary, [b"optimizer.lr=1e-3,1e-4", b"a.b,c=[1, x],[2, y]"]),
    "--set": (
        lambda text: load_recipe(arch="gpt", preset="char-cpu", sets=[text]),
        [
            b"model.d_model=64", b"objectives.0.kind=causal_lm",
            b"model.decoder={num_layers: 2, norm: {kind: rmsnorm}}",
            b"data.train=[{path: a.txt, weight: 2.0}]",
            b"model.decoder.layers.0.dropout=0.1", b"optimizer.betas=[0.9, 1]",
        ],
    ),
}  # fmt: skip


CORPUS = {
    "an escape sequence beyond Unicode": ("a recipe", b'arch: "\\Uffffffff"\n'),
    "a version of 5,000 digits": ("a recipe", b"%YAML " + b"1" * 5000 + b".1\n---\narch: gpt\n"),
    "a key of 900,000 letters": ("a recipe", b"? " + b"a" * 900_000 + b"\n: 1\n"),
    "a key of two lines": ("a recipe", b'"a\\nb": 1\n' * 3),
    "200,000 open lists": ("the plan of a sweep", b"tasks: " + b"[" * 200_000),
    "4,000 values of an axis": ("the plan of a sweep", PLAN.replace(b"[1e-3, 1e-4]", f"{[*range(4_000)]}".encode())),
    "a recipe that is not text": ("the recipe of a run", bytes(range(256)) * 100),
    "a step of 400 digits": ("metrics", METRICS.replace(b'"step": 2', b'"step": 2' + b"0" * 400)),
    "a loss of 400 digits": ("metrics", METRICS.replace(b"2.25", b"2" * 400)),
    "a step of 10,000 digits": ("metrics", METRICS.replace(b'"step": 2', b'"step": ' + b"2" * 10_000)),
    "metrics nested 100,000 deep": ("metrics", b"[" * 100_000 + b"\n" + METRICS),
    "a float without end": ("config.json", json.dumps(CONFIGS[2]).replace("1e-05", "1" + "0" * 400).encode()),
    "10**12 layers": ("config.json", json.dumps(CONFIGS[0] | {"n_layer": 10**12}).encode()),
}


CORPUS |= {
    "a list of 450,000 values": ("the recipe of a run", b"model: [" + b"1," * 450_000 + b"]"),
    "100,000 values of an axis": (
        "the plan of a sweep",
        PLAN.replace(b"[1e-3, 1e-4]", f"{list(range(99_000))}".encode()),
    ),
}
"""The last two are slow: quickly, one has fewer values, and `test_the_ceiling_of_values_is_exact` lowers the limit."""


@first_is_quick("fault", CORPUS, quick=len(CORPUS) - 2)
def test_a_past_fault_stays_mended(fault: str, tmp_path: Path) -> None:
    name, content = CORPUS[fault]
    tried(PARSERS[name], tmp_path, content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--set", f"objectives.{'9' * 5000}.kind=lm"),
        ("--set", ".".join("a" * 3000) + "=1"),
        ("--set", "a\nb=1"),
        ("--shard-size", "9" * 500),
        ("--ids", "9" * 5000),
        ("--lengths", "9" * 5000),
        ("--device", "cuda:²"),
        ("--device", f"cuda:{'9' * 5000}"),
    ],
)
def test_a_past_fault_of_an_option_is_one_line(name: str, value: str) -> None:
    found = answer(lambda: OPTIONS[name][0](value))
    assert isinstance(found, InputError) and "\n" not in found.message


def test_a_column_of_5000_digits_is_a_name() -> None:
    assert parse_column("9" * 5000) == "9" * 5000 and parse_column("17") == 17


def test_the_ceiling_of_values_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1000)
    inside = 1000 - 2  # beside the mapping and its list
    assert len(yaml_text.parse_yaml(f"a: [{'1,' * inside}]", name="x").value["a"]) == inside
    with pytest.raises(InputError, match="x:1: found more than 1,000 values, expected at most 1,000"):
        yaml_text.parse_yaml(f"a: [{'1,' * (inside + 1)}]", name="x")


@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data())
@quick
def test_any_value_of_an_option_is_read_or_refused(name: str, data: st.DataObject) -> None:
    read, valid = OPTIONS[name]
    content = data.draw(damaged(valid)).translate(None, b"\0\n")  # no NUL can be given, and messages quote the value
    text = os.fsdecode(content)  # as the kernel hands it over: any bytes
    answer(lambda: read(text))
