"""Damage to a file: raw changes of its bytes, and forgeries, after which its format is still followed.

A forgery is made of the parsed content (JSON, YAML, the header of a tensor file); the caller computes hashes anew.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 0.5, -0.0, 1e308, 10**400, 2**31, 2**63, -(2**63), math.nan, math.inf, -math.inf,
    "", "x", "0", "null", "../../x", "/etc/passwd", "a\0b", "\ud800", "é" * 300, "step-00000002", "cls", "F32",
    [], {}, [[]], [None], [1, 2, 3], {"x": 1}, {"": {}}, [0] * 500,
]  # fmt: skip
NESTED = 30_000  # levels: more than a parser may follow


@dataclass(frozen=True)
class Mutation:
    """One change of a file. `content` is its new bytes, or a path that a symbolic link in its place leads to.

    what: the class of the change, and where it is; for reports.
    """

    what: str
    content: bytes | Path

    def put(self, path: Path) -> None:
        path.unlink()
        if isinstance(self.content, Path):
            path.symlink_to(self.content)
        else:
            path.write_bytes(self.content)


def raw(data: bytes, draw: Random) -> Mutation:
    """The bytes with one to eight of them flipped, or with a block removed, inserted, swapped, zeroed or repeated."""
    out, size = bytearray(data), len(data)
    start = draw.randrange(size)
    stop = min(size, start + draw.choice([1, 2, 8, 64, 1024]))
    kind = draw.choice(["flip", "flip", "truncate", "insert", "remove", "swap", "zero", "repeat", "append"])
    if kind == "flip":
        for _ in range(draw.randint(1, 8)):
            out[draw.randrange(size)] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del out[start:]
    elif kind == "insert":
        out[start:start] = draw.randbytes(draw.choice([1, 4, 100]))
    elif kind == "remove":
        del out[start:stop]
    elif kind == "swap":
        other = draw.randrange(size)
        out[start], out[other] = out[other], out[start]
    elif kind == "zero":
        out[start:stop] = bytes(stop - start)
    elif kind == "repeat":
        out[start:start] = out[start:stop]
    else:
        out += draw.choice([b"\0", b"\n", b"x" * 1000, draw.randbytes(9)])
    return Mutation(f"raw {kind}", bytes(out)) if out != data else raw(data, draw)


def forged(path: Path, draw: Random, others: list[Path]) -> Mutation:
    """The file at `path`, changed within its format. others: files that may stand in its place or give it parts."""
    data = path.read_bytes()
    if draw.random() < 0.04:
        return _link(path, draw)
    if draw.random() < 0.03:
        other = draw.choice(others)
        return Mutation(f"content of {other.name}", other.read_bytes())
    if path.suffix == ".safetensors":
        return forged_tensors(data, draw, [other.read_bytes() for other in others if other.suffix == path.suffix])
    if path.suffix == ".json":
        return forged_json(data, draw)
    if path.suffix == ".yaml":
        return _forged_yaml(data, draw)
    if path.suffix == ".jsonl":
        lines = data.splitlines(keepends=True)
        number = draw.randrange(len(lines))
        changed = forged_json(lines[number], draw)
        assert isinstance(changed.content, bytes)
        lines[number] = changed.content + draw.choice([b"\n", b"\n", b"", b"\r\n"])
        return Mutation(f"line: {changed.what}", b"".join(lines))
    words = [str(word) for word in JUNK] + ["step-00000002", "step-1", "step-99999999999999999999", "step-00000004\n\n"]
    word = draw.choice(words)
    return Mutation(f"pointer: {word[:20]!r}", word.encode("utf-8", "surrogatepass"))


def _link(path: Path, draw: Random) -> Mutation:
    """A link to a device, to nothing, to itself, to its folder, or to another file there: a command may write to it."""
    beside = sorted(Path(other.name) for other in path.parent.iterdir() if other.is_file())
    target = draw.choice([Path("/dev/zero"), Path("/dev/null"), Path("nowhere"), Path("."), *beside])
    return Mutation(f"link to {target}", target)


# --- JSON -------------------------------------------------------------------------------------------------------------


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below the top of a document."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def change_value(document: Any, draw: Random) -> str:
    """Change a parsed document in place; returns what was changed and where."""
    paths = list(places(document))
    top = {path[0] for path in paths}
    first = draw.choice(sorted(top, key=str))  # a long table does not take all the changes
    path = draw.choice([path for path in paths if path[0] == first])
    where, place, key = ".".join(map(str, path))[:60], _at(document, path[:-1]), path[-1]
    kind = draw.choice(["value", "value", "value", "type", "near", "remove", "add", "rename", "exchange"])
    if kind == "value":
        place[key] = deepcopy(draw.choice(JUNK))
    elif kind == "type":
        place[key] = draw.choice([str(place[key]), [place[key]], {"value": place[key]}])
    elif kind == "near" and isinstance(place[key], int | float) and not isinstance(place[key], bool):
        value = place[key]
        place[key] = draw.choice(
            [value + 1, value - 1, -value, value * 2, value + 0.5 if abs(value) < 2**60 else 7, value * 10**6]
        )
    elif kind == "remove":
        del place[key]
    elif kind == "add" and isinstance(place, dict):
        place[draw.choice(["moon", "", "a.b", "__class__", "ünïcode"])] = deepcopy(draw.choice(JUNK))
    elif kind == "rename" and isinstance(place, dict):
        place[f"{key}_"] = place.pop(key)
    else:
        other = draw.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        place[key], place[other] = place[other], place[key]
        kind = "exchange"
    return f"{kind} {where}"


def forged_json(data: bytes, draw: Random) -> Mutation:
    """JSON text with one to three values changed, a key doubled, or nested too deeply."""
    document = json.loads(data)
    text_kind = draw.random()
    if text_kind < 0.04:
        opening, closing = draw.choice([("[", "]"), ('{"a":', "}")])
        return Mutation("nested deeply", (opening * NESTED + "1" + closing * NESTED).encode())
    if text_kind < 0.08:
        key = draw.choice(sorted(document)) if isinstance(document, dict) and document else "x"
        return Mutation(f"twice {key}", b'{"' + key.encode() + b'": 1, ' + data.lstrip()[1:])
    if text_kind < 0.10:
        return Mutation("another top", json.dumps(draw.choice(JUNK)).encode())
    done = [change_value(document, draw) for _ in range(draw.choice([1, 1, 1, 2, 3])) if document]
    return Mutation("; ".join(done), json.dumps(document).encode())


def _forged_yaml(data: bytes, draw: Random) -> Mutation:
    document = yaml.safe_load(data)
    if draw.random() < 0.06:
        head = draw.choice(["a: &x 1\nb: *x\n", "!!python/object/apply:os.getcwd []\n", "schema: 2\n", "- 1\n",
                            "%YAML 9\n", "[" * 5000, "\t\n", "a: {b: [c\n", "model: 1\n",
                            "seed: 1\nseed: 2\n"])  # fmt: skip
        return Mutation(f"text {head[:12]!r}", head.encode() + draw.choice([b"", data]))
    done = [change_value(document, draw) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    return Mutation("; ".join(done), yaml.safe_dump(document, sort_keys=False).encode("utf-8", "replace"))


# --- safetensors ------------------------------------------------------------------------------------------------------

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1,
         "F8_E4M3": 1, "C128": 16}  # fmt: skip


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes behind it."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def pack(header: Any, blob: bytes, *, length: int | None = None, text: bytes | None = None) -> bytes:
    """The bytes of a tensor file. length: what it claims its header has; text: the header's own."""
    text = json.dumps(header).encode() if text is None else text
    return struct.pack("<Q", len(text) if length is None else length) + text + blob


Change = Callable[[dict[str, Any], bytearray, Random], bytes | None]


def forged_tensors(data: bytes, draw: Random, others: list[bytes]) -> Mutation:
    """A tensor file with a false header, or with tensors that are not its own."""
    header, blob = unpack(data)
    if draw.random() < 0.4:
        what = change_value(header, draw)
        return Mutation(f"header {what}", pack(header, blob))
    name = draw.choice(sorted(TENSOR_CHANGES))
    content = bytearray(blob)
    if name == "tensor of another file":
        other_header, other_blob = unpack(draw.choice(others))
        header["__metadata__"] = {}
        key = draw.choice(_names(other_header))
        start, stop = other_header[key]["data_offsets"]
        header[key] = other_header[key] | {"data_offsets": [len(content), len(content) + stop - start]}
        return Mutation(f"{name}: {key}", pack(header, bytes(content) + other_blob[start:stop]))
    result = TENSOR_CHANGES[name](header, content, draw)
    return Mutation(name, pack(header, bytes(content)) if result is None else result)


def _names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def _span(header: dict[str, Any], draw: Random) -> tuple[str, int, int]:
    name = draw.choice(_names(header))
    return name, *header[name]["data_offsets"]


def _poison(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    name, start, stop = _span(header, draw)
    if header[name]["dtype"] == "F32" and stop > start:
        struct.pack_into("<f", blob, draw.randrange(start, stop, 4), draw.choice([math.nan, math.inf, -math.inf]))


def _new_values(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    name, start, stop = _span(header, draw)
    if header[name]["dtype"] == "F32":
        values = np.random.default_rng(draw.randrange(2**32)).standard_normal((stop - start) // 4)
        blob[start:stop] = values.astype("<f4").tobytes()


def _transpose(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    matrices = [name for name in _names(header) if len(header[name]["shape"]) == 2 and header[name]["dtype"] == "F32"]
    if not matrices:
        return
    name = draw.choice(matrices)
    start, stop = header[name]["data_offsets"]
    values = np.frombuffer(blob[start:stop], "<f4").reshape(header[name]["shape"]).T
    blob[start:stop] = np.ascontiguousarray(values).tobytes()
    header[name]["shape"] = list(values.shape)


def _retype(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    """Another number format of the same bytes, with a shape to fit."""
    name = draw.choice(_names(header))
    code = draw.choice(sorted(SIZES))
    shape = header[name]["shape"]
    factor = SIZES[header[name]["dtype"]] / SIZES[code]
    header[name]["dtype"] = code
    if factor != 1 and shape:
        shape[-1] = int(shape[-1] * factor)


def _as_float64(header: dict[str, Any], blob: bytearray, draw: Random) -> bytes:
    """Every tensor stored as F64: equal numbers."""
    out, position, entries = b"", 0, {}
    for name in sorted(_names(header), key=lambda key: header[key]["data_offsets"]):
        start, stop = header[name]["data_offsets"]
        part, code = bytes(blob[start:stop]), header[name]["dtype"]
        if code == "F32":
            part, code = np.frombuffer(part, "<f4").astype("<f8").tobytes(), "F64"
        entries[name] = {
            "dtype": code,
            "shape": header[name]["shape"],
            "data_offsets": [position, position + len(part)],
        }
        out, position = out + part, position + len(part)
    return pack(entries, out)


def _offsets(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    """A hole, an overlap, or offsets before the beginning or beyond the end."""
    name, start, stop = _span(header, draw)
    shift = draw.choice([-8, -4, 4, 8, 10**9, 2**62, -(10**9)])
    header[name]["data_offsets"] = draw.choice([[start + shift, stop + shift], [start, stop + shift], [stop, start]])


def _drop(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    """A tensor removed with its bytes; the others move up."""
    name, start, stop = _span(header, draw)
    del header[name], blob[start:stop]
    for key in _names(header):
        if header[key]["data_offsets"][0] >= stop:
            header[key]["data_offsets"] = [place - (stop - start) for place in header[key]["data_offsets"]]


def _swap_names(header: dict[str, Any], blob: bytearray, draw: Random) -> None:
    one, other = draw.choice(_names(header)), draw.choice(_names(header))
    header[one], header[other] = header[other], header[one]


TENSOR_CHANGES: dict[str, Change] = {
    "not finite": _poison,
    "other values": _new_values,
    "transposed": _transpose,
    "another number format of the same bytes": _retype,
    "stored as F64": _as_float64,
    "offsets": _offsets,
    "tensor removed": _drop,
    "names exchanged": _swap_names,
    "tensor of another file": lambda header, blob, draw: None,
    "length of the header": lambda h, b, draw: pack(
        h, bytes(b), length=draw.choice([0, 1, 7, 8, 100, 2**31, 2**62, 2**63, 2**64 - 1, 100_000_001])
    ),
    "bytes left over": lambda h, b, draw: pack(h, bytes(b) + draw.randbytes(draw.choice([1, 4, 4096]))),
    "header is no object": lambda h, b, draw: pack(
        None, bytes(b), text=draw.choice([b"[]", b"", b"{", b"null", b"[" * NESTED, b'{"a":' * NESTED, b"\xff{}"])
    ),
    "header padded": lambda h, b, draw: pack(None, bytes(b), text=json.dumps(h).encode() + b" " * 64),
    "pickle": lambda h, b, draw: b"\x80\x04\x95" + bytes(b),
    "zip of pickles": lambda h, b, draw: b"PK\x03\x04" + bytes(b),
    "pointer of Git LFS": lambda h, b, draw: b"version https://git-lfs.github.com/spec/v1\n",
    "empty": lambda h, b, draw: b"",
}
