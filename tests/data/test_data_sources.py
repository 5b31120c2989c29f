"""Text sources: files, folders, globs, standard input, compression, tables."""

from __future__ import annotations

import gzip
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.fakes import Documents, Spec, open_one, pipe, read_documents, refusal, write
from tformer.data.sources import builtin
from tformer.data.sources import files as text_module
from tformer.data.sources import parquet as parquet_module
from tformer.data.sources.files import PIECE_BYTES, decode_text, end_last
from tformer.data.sources.labelled import open_labelled
from tformer.data.sources.parquet import PARQUET_BYTES, PARQUET_ROWS, _rows_at_once, parquet_rows
from tformer.data.sources.text import open_sources
from tformer.support.errors import InputError


def test_text_file_is_one_document(tmp_path: Path, documents: Documents) -> None:
    assert documents(write(tmp_path / "a.txt", "one\n\ntwo\n")) == ["one\n\ntwo\n"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one line", "one line"),  # one line, no final newline
        (b"a\0b\n", "a\0b\n"),  # NUL is preserved
        (b"\xef\xbb\xbfa\xef\xbb\xbfb", "a\ufeffb"),  # the byte order mark is stripped once
        (b"\xef\xbb\xbf\xef\xbb\xbfa", "\ufeffa"),
        (b"a\r\nb\rc\n\r\n", "a\nb\rc\n\n"),  # CRLF is LF, a carriage return alone is text
        (b"a<|endoftext|>b", "a<|endoftext|>b"),
    ],
)
def test_text_is_read_as_it_is_but_for_newlines_and_mark(
    tmp_path: Path, documents: Documents, content: bytes, expected: str
) -> None:
    assert documents(write(tmp_path / "a.txt", content)) == [expected]


@given(
    text=st.text(st.characters(codec="utf-8") | st.sampled_from("\r\n\x85\u2028\0")),
    sizes=st.lists(st.integers(1, 5), min_size=1),
)
def test_text_does_not_depend_on_where_bytes_are_cut(text: str, sizes: list[int]) -> None:
    data = b"\xef\xbb\xbf" + text.encode()
    chunks, start = [], 0
    while start < len(data):
        chunks.append(data[start : start + sizes[len(chunks) % len(sizes)]])
        start += len(chunks[-1])
    read = "".join(decode_text(iter(chunks), name="x", errors="strict"))
    assert read == text.replace("\r\n", "\n")


@given(
    before=st.text("ab\n\ré", max_size=30),
    bad=st.sampled_from([b"\xff", b"\xc3", b"\xe2\x82", b"\x80", b"\xed\xa0\x80"]),
    size=st.integers(1, 9),
)
def test_invalid_utf8_names_file_line_and_byte(before: str, bad: bytes, size: int) -> None:
    data = before.encode() + bad + b"a"
    chunks = iter([data[start : start + size] for start in range(0, len(data), size)])
    error = refusal(lambda: list(decode_text(chunks, name="corpus.txt", errors="strict")))
    line = before.replace("\r\n", "\n").count("\n") + 1
    assert error.message.startswith(f"corpus.txt:{line}: invalid UTF-8 at byte {len(before.encode())} (0x{bad[0]:02x}")


def test_invalid_utf8_is_replaced_with_errors_replace(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.txt", b"caf\xe9 ok\n")
    error = refusal(lambda: documents(path))
    assert f"{path}:1: invalid UTF-8 at byte 3 (0xe9" in error.message
    assert error.hint is not None and "--invalid-utf8 replace" in error.hint
    assert documents(path, errors="replace") == ["caf\ufffd ok\n"]


def test_long_text_comes_in_pieces_of_one_document(tmp_path: Path) -> None:
    source = open_one(write(tmp_path / "a.txt", "x" * (2 * PIECE_BYTES + 5)))
    pieces = list(source.documents())
    assert max(len(piece.text) for piece in pieces) <= PIECE_BYTES
    assert [piece.ends_document for piece in pieces] == [False, False, True]
    assert source.size_bytes() == 2 * PIECE_BYTES + 5


def test_end_last_marks_the_last_piece_only() -> None:
    assert list(end_last(iter([]))) == []
    assert [piece.ends_document for piece in end_last(iter(["a", "b"]))] == [False, True]


def test_rows_in_a_file_json_are_no_running_text_and_stay_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a dog", "label": "x"}\n{"text": "a cat", "label": "y"}\n')
    with pytest.raises(InputError, match="found JSON, expected text"):
        list(open_sources([Spec(str(path))])[0].documents())
    [source] = open_labelled([Spec(str(path))])
    assert [row.text for row in source.rows()] == ["a dog", "a cat"]


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(lambda: open_one(tmp_path / "no.txt")).message == f"{tmp_path}/no.txt: no such file or directory"


def test_device_is_refused() -> None:
    assert "device" in refusal(lambda: open_one("/dev/null")).message


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "text")

    def deny(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    assert refusal(lambda: open_one(path)).message == f"{path}: cannot be read: permission denied"


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_text_is_read(tmp_path: Path, documents: Documents, ending: str, compress: Callable) -> None:
    text = "".join(f"line {number}\n" for number in range(20000))
    path = write(tmp_path / f"a.txt{ending}", compress(text.encode()))
    assert documents(path) == [text]
    two = write(tmp_path / f"b.txt{ending}", compress(b"one\n") + compress(b"two\n"))
    assert documents(two) == ["one\ntwo\n"]
    assert open_one(path).size_bytes() is None
    assert documents(write(tmp_path / f"c.jsonl{ending}", compress(b'{"text": "a"}\n{"text": "b"}'))) == ["a", "b"]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_damaged_compression_names_file_and_offset(
    tmp_path: Path, documents: Documents, ending: str, compress: Callable
) -> None:
    data = compress(os.urandom(50000).hex().encode())
    cut = write(tmp_path / f"cut{ending}", data[:30000])
    message = refusal(lambda: documents(cut)).message
    assert message == f"{cut}: damaged {ending} data: it ends at byte 30000, before its content does"
    flipped = bytearray(data)
    flipped[20] ^= 0xFF
    broken = refusal(lambda: documents(write(tmp_path / f"flip{ending}", bytes(flipped) + b"x"))).message
    assert ("damaged" in broken and "byte" in broken) or "UTF-8" in broken
    foreign = write(tmp_path / f"foreign{ending}", "plain text")
    assert f"{foreign}: damaged {ending} data between bytes 0 and 10" in refusal(lambda: documents(foreign)).message


@pytest.mark.parametrize("name", ["text", "random"])
@pytest.mark.parametrize("place", [300, 20_000, 60_000])
def test_a_gzip_damaged_in_its_middle_says_between_which_bytes(
    tmp_path: Path, documents: Documents, name: str, place: int
) -> None:
    content = os.urandom(200_000).hex() if name == "random" else "".join(f"{n * n} " for n in range(60_000))
    data = bytearray(gzip.compress(content.encode()))
    for byte in range(place, place + 40):
        data[byte] ^= 0xFF
    message = refusal(lambda: documents(write(tmp_path / "a.gz", bytes(data)))).message
    found = re.search(r"between bytes (\d+) and (\d+)", message)
    assert found and int(found[1]) <= place + 40 and place <= int(found[2]) <= len(data)
    assert "check" in message or int(found[2]) - int(found[1]) <= 2**15


def test_gzip_checksum_is_verified_and_padding_allowed(tmp_path: Path, documents: Documents) -> None:
    data = bytearray(gzip.compress(b"some text here\n" * 50))
    assert documents(write(tmp_path / "padded.gz", bytes(data) + bytes(600))) == ["some text here\n" * 50]
    data[-6] ^= 1
    assert "damaged .gz data" in refusal(lambda: documents(write(tmp_path / "a.gz", bytes(data)))).message


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("a.txt.zst", "zstandard", "zstd"), ("a.parquet", "pyarrow.parquet", "parquet")]
)
def test_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = refusal(lambda: open_one(write(tmp_path / name, b"anything")))
    assert f"tformer[{extra}]" in str(error.hint)


def test_folder_is_read_recursively_in_order(tmp_path: Path, documents: Documents) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a" / "deep" / "rows.jsonl.gz", gzip.compress(b'{"text": "1"}\n{"text": "2"}\n'))
    write(tmp_path / "a" / "empty.txt", "")
    write(tmp_path / "image.png", b"\x89PNG\0\xff")
    write(tmp_path / ".git" / "config.txt", "hidden")
    assert documents(tmp_path) == ["1", "2", "z", "b"]
    assert open_one(tmp_path).notes == ()


def test_binary_files_with_the_ending_of_a_text_are_skipped_and_noted(tmp_path: Path, documents: Documents) -> None:
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.txt", b"\x89PNG\0\xff\xfe\0")
    write(tmp_path / "c.txt", "nul \0 and é" * 2000)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    source = open_one(tmp_path)
    assert len(read_documents(source)) == 2
    assert source.notes == (f"{tmp_path}: skipped 2 unreadable or binary files, {tmp_path}/b.txt first",)


def test_folder_with_nothing_readable_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path}: no text in this folder" in refusal(lambda: open_one(tmp_path)).message
    write(tmp_path / "image.txt", b"\0\xff" * 50)
    assert "1 files with a known ending cannot be read" in refusal(lambda: open_one(tmp_path)).message
    (tmp_path / "image.txt").unlink()
    write(tmp_path / "empty.txt", "")
    assert f"{tmp_path}: is empty" in refusal(lambda: open_one(tmp_path)).message


def test_invalid_utf8_in_a_folder_is_an_error_not_a_skip(tmp_path: Path, documents: Documents) -> None:
    write(tmp_path / "latin.txt", b"caf\xe9")
    assert f"{tmp_path}/latin.txt:1: invalid UTF-8 at byte 3" in refusal(lambda: documents(tmp_path)).message


def test_glob_is_read_in_order_and_refused_when_nothing_matches(tmp_path: Path, documents: Documents) -> None:
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt"):
        write(tmp_path / name, name)
    assert documents(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert documents(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "deep/d.txt"]
    assert "no file matches this pattern" in refusal(lambda: open_one(tmp_path / "*.csv")).message
    odd = write(tmp_path / "odd[1].txt", "odd")
    assert documents(odd) == ["odd"]


def test_standard_input_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"from\r\na pipe")
    source = open_one("-")
    assert read_documents(source) == read_documents(source) == ["from\na pipe"]
    assert source.size_bytes() == 12
    pipe(monkeypatch, b"from\r\na pipe")
    assert open_one("-").fingerprint() == source.fingerprint()
    pipe(monkeypatch, b"")
    assert refusal(lambda: open_one("-")).message == "standard input: is empty"
    pipe(monkeypatch, b"a\nb\xff")
    assert "standard input:2: invalid UTF-8 at byte 3" in refusal(lambda: read_documents(open_one("-"))).message


def test_fifo_is_read_like_standard_input(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"through the pipe\n"))
    writer.start()
    source = open_one(fifo)
    writer.join()
    assert read_documents(source) == read_documents(source) == ["through the pipe\n"]


def test_built_in_text_has_a_document_for_each_module_and_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    (docs,) = open_sources([])
    assert docs.name == "builtin:python-docs"
    [textwrap] = [path for path in builtin.stdlib_files() if path.name == "textwrap.py"]
    monkeypatch.setattr(builtin, "stdlib_files", lambda: (textwrap,))
    texts = builtin.python_docs.__wrapped__()
    assert any(text.startswith("Module textwrap\n") and "def wrap(" in text for text in texts)
    assert any(text.startswith('The "yield" statement') for text in texts)


@pytest.mark.slow
def test_built_in_text_is_pythons_documentation() -> None:
    """Its quick twin is `test_built_in_text_has_a_document_for_each_module_and_topic`."""
    (docs,) = open_sources([])
    texts = read_documents(docs)
    assert sum(map(len, texts)) > 500_000
    assert any(text.startswith("Module textwrap\n") and "def wrap(" in text for text in texts)
    assert any(text.startswith('The "yield" statement') for text in texts)
    assert docs.fingerprint() == open_sources([])[0].fingerprint()


def test_built_in_code_is_pythons_library() -> None:
    stdlib = open_one("builtin:python-stdlib")
    sources = read_documents(stdlib)
    assert sum(map(len, sources)) > 3_000_000
    assert sum("def wrap(" in text and "class TextWrapper" in text for text in sources) == 1
    assert stdlib.fingerprint() != open_sources([])[0].fingerprint()


def test_unknown_builtin_suggests_the_nearest() -> None:
    error = refusal(lambda: open_one("builtin:python-doc"))
    assert "did you mean 'python-docs'?" in str(error.hint)


def test_sources_keep_their_weights_and_order(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, name) for name in ("a.txt", "b.txt")]
    opened = open_sources([Spec(str(paths[0]), weight=2.0), Spec(str(paths[1]), weight=1.0)])
    assert [(source.name, source.weight) for source in opened] == [(str(paths[0]), 2.0), (str(paths[1]), 1.0)]


def test_fingerprint_follows_the_text_and_how_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text one")
    first = open_one(path).fingerprint()
    assert open_one(path).fingerprint() == first
    os.utime(path, (1, 1))
    assert open_one(path).fingerprint() == first, "a small file is known by its content"
    assert open_one(write(tmp_path / "moved.txt", "text one")).fingerprint() == first
    assert open_one(path, errors="replace").fingerprint() != first
    assert open_one(write(path, "text two")).fingerprint() != first


def test_fingerprint_of_a_large_file_reads_its_ends_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x" * (5 << 20))
    os.utime(path, ns=(5, 5))
    first = open_one(path).fingerprint()
    os.utime(path, ns=(6, 6))
    assert open_one(path).fingerprint() != first
    write(path, b"x" * ((5 << 20) - 1) + b"y")
    os.utime(path, ns=(5, 5))
    assert open_one(path).fingerprint() != first


def test_a_column_is_a_number_or_a_name() -> None:
    from tformer.data.sources.columns import parse_column

    assert [parse_column(text) for text in (None, "2", "text", "²", "-1")] == [None, 2, "text", "²", "-1"]


def test_a_home_that_does_not_exist_is_a_missing_file() -> None:
    with pytest.raises(InputError, match="no such file"):
        open_sources([Spec("~nosuchuser/text.txt")])


def test_jsonl_rows_are_documents_and_other_keys_are_ignored(tmp_path: Path, documents: Documents) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text": "one\\nline", "meta": {"deep": [1, {"text": "no"}]}}\n\n{"id": 1, "text": "é"}\r\n{"text": ""}\n'
        '{"text": null}\n{"text": "last", "body": "other"}',
    )
    assert documents(path) == ["one\nline", "é", "last"]
    assert documents(write(tmp_path / "b.ndjson", '{"body": "x"}'), column="body") == ["x"]


def test_jsonl_half_characters_are_replaced_with_errors_replace(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert documents(path, errors="replace") == ["a\ufffdb 😀"]


def test_csv_is_read_as_spreadsheets_write_it(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.csv", '\ufeffid,text\r\n1,"say ""hi"", you\r\nsecond line"\r\n2,plain\r\n\r\n3,\r\n')
    assert documents(path) == ['say "hi", you\nsecond line', "plain"]
    assert documents(path, column="id") == ["1", "2", "3"]
    assert documents(path, column=0) == ["id", "1", "2", "3"]


def test_tsv_has_no_quoting(tmp_path: Path, documents: Documents) -> None:
    path = write(tmp_path / "a.tsv", 'label\ttext\n0\t"quoted" and "open\n1\tb\n')
    assert documents(path) == ['"quoted" and "open', "b"]


def test_rows_that_never_end_are_refused_in_bounded_memory(
    tmp_path: Path, documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "MAX_ROW_CHARACTERS", 1000)
    monkeypatch.setattr("tformer.data.sources.tables.MAX_ROW_CHARACTERS", 1000)
    endless = write(tmp_path / "a.jsonl", '{"text": "' + "x" * 5000 + '"}')
    assert f"{endless}:1: a row has more than 1,000 characters" in refusal(lambda: documents(endless)).message
    unclosed = write(tmp_path / "a.csv", 'text\n"open\n' + "line\n" * 1000)
    assert f"{unclosed}:2: a quote opens a cell and is never closed" in refusal(lambda: documents(unclosed)).message


def test_parquet_rows_are_documents(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [f"row {number}" for number in range(1000)]
    table = pa.table({"n": list(range(1002)), "text": [*rows, None, ""], "kind": pa.array(["k"] * 1002)})
    table = table.set_column(2, "kind", table["kind"].dictionary_encode())
    parquet.write_table(table, path, row_group_size=300)
    assert documents(path) == rows == documents(path, column=1)
    assert documents(path, column="kind") == ["k"] * 1002
    assert "no column 'body'" in refusal(lambda: documents(path, column="body")).message
    assert "should hold text, found int64" in refusal(lambda: documents(path, column="n")).message


def test_large_rows_of_parquet_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    for characters, expected in ((10, PARQUET_ROWS), (PARQUET_BYTES // 4, 3)):
        rows = ["x" * characters] * 5
        parquet.write_table(pa.table({"text": rows}), path, compression="none", use_dictionary=False)
        assert _rows_at_once(parquet.ParquetFile(path).metadata) == expected
        assert [text for (text,) in parquet_rows(path, ["text"])] == rows


def test_a_parquet_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mapped file, this would end the process with SIGBUS."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["x" * 1000] * 100}), path, compression="none", use_dictionary=False)

    def cut(_: object) -> int:
        os.truncate(path, 4096)
        return PARQUET_ROWS

    monkeypatch.setattr(parquet_module, "_rows_at_once", cut)
    assert refusal(lambda: list(parquet_rows(path, ["text"]))).message.startswith(
        f"{path}: damaged Parquet data after row 0: "
    )


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", "text,n,n,text\na,1,2,b\n"), ("a.tsv", "text\tn\tn\ttext\na\t1\t2\tb\n")]
)
def test_two_columns_of_the_texts_name_are_refused(
    tmp_path: Path, documents: Documents, name: str, content: str
) -> None:
    path = write(tmp_path / name, content)
    assert refusal(lambda: documents(path)).message == f"{path}:1: 2 columns are called 'text'"
    other = write(tmp_path / f"b{path.suffix}", content.replace("text", "x", 1))
    assert documents(other) == ["b"]


def test_two_parquet_columns_of_the_texts_name_are_refused(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["a"], ["b"], ["c"]], names=["text", "body", "text"]), path)
    for column in (None, 2):
        assert refusal(lambda column=column: documents(path, column=column)).message == (
            f"{path}: 2 columns are called 'text'"
        )
    assert documents(path, column="body") == ["b"]


def test_damaged_parquet_names_file_and_offset(tmp_path: Path, documents: Documents) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [os.urandom(20).hex() for _ in range(2000)]}), path, row_group_size=500)
    data = path.read_bytes()
    cut = write(tmp_path / "cut.parquet", data[:-100])
    assert f"{cut}: damaged or not Parquet: expected b'PAR1' at byte {len(data) - 104}" in (
        refusal(lambda: documents(cut)).message
    )
    hurt = bytearray(data)
    hurt[len(data) // 2 : len(data) // 2 + 9000] = bytes(9000)
    message = refusal(lambda: documents(write(tmp_path / "hurt.parquet", bytes(hurt)))).message
    assert "damaged Parquet data after row" in message
    hurt = bytearray(data)
    hurt[-60:-20] = bytes(40)
    assert "damaged Parquet" in refusal(lambda: documents(write(tmp_path / "foot.parquet", bytes(hurt)))).message
