"""`tformer train --objective chat`, `tformer chat` and `generate --chat`: as a user runs them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.random_runs import random_run
from tests.training.pair_makers import metrics
from tformer.cli.chat import WordWrapper
from tformer.decoding.chat import ChatSession
from tformer.decoding.options import GenerateOptions
from tformer.decoding.writers import Sampler, load_models, make_writer
from tformer.tokenizer.chat import ChatTemplate

Cli = Callable[..., Any]
RECIPE = """\
arch: gpt
tokenizer: {train: {model: byte-bpe, vocab_size: 280, template: chatml, digits: true}}
model:
  d_model: 32
  max_seq_len: 64
  decoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 64}}
optimizer: {lr: 0.01}
training: {max_steps: 4, batch_size: 8, eval_every: 4, save_every: 4, log_every: 2,
           precision: fp32, device: cpu, threads: 1, sample_every: 0}
generation: {max_new_tokens: 8, temperature: 0}
"""
QUESTIONS = [(f"say {word}", word) for word in ("a", "b", "c", "d")]


CHATS = ("--objective", "chat", "--data", "chats.jsonl")


def write_chats(path: Path) -> Path:
    rows = [{"prompt": asked, "completion": answer} for asked, answer in QUESTIONS * 20]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def succeed(cli: Cli, *words: object) -> Any:
    outcome = cli(*words)
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pre-trained run `base` and a run `assistant` that answers the questions."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text("user and assistant say a b c d\n" * 60)
    write_chats(folder / "chats.jsonl")
    from tformer.cli.app import main

    for words in (
        ("--config", "recipe.yaml", "--data", "text.txt", "--out", "base"),
        ("--init-from", "base", "--objective", "chat", "--data", "chats.jsonl", "--max-steps", "200",
         "--set", "training.eval_every=200", "--set", "training.save_every=200", "--out", "assistant"),
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.chdir(folder)
            main(["train", *words])
        assert end.value.code == 0
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("base", "assistant"):
        shutil.copytree(made / name, tmp_path / name)
    for name in ("chats.jsonl", "recipe.yaml"):
        shutil.copy(made / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def talk(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`talk(lines, ...)`: `tformer chat` with these lines from a pipe."""

    def run(lines: list[str], *words: object) -> Any:
        Path("lines.txt").write_text("".join(f"{line}\n" for line in lines))
        with open("lines.txt") as file:
            monkeypatch.setattr("sys.stdin", file)
            return cli("chat", *words)

    return run


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_learns_and_the_recipe_keeps_template_and_ends(folder: Path) -> None:
    losses = [record["loss"] for record in metrics(folder / "assistant", "train")]
    assert losses[-1] < losses[0] / 2
    recipe, tokenizer = tformer.load("assistant").recipe, tformer.load("assistant").tokenizer
    assert recipe.tokenizer.chat_template == "chatml"
    assert tokenizer is not None and recipe.generation.stop_tokens == (tokenizer.token_id("<|im_end|>"),)


@pytest.mark.slow  # quick: tests/objectives/test_objectives_chat.py
def test_packing_changes_the_number_of_samples_not_what_is_learned(cli: Cli) -> None:
    shared = ("train", "--init-from", "base", "--objective", "chat", "--data", "chats.jsonl", "--max-steps", 2)
    succeed(cli, *shared, "--out", "packed", "--valid", "chats.jsonl")
    succeed(cli, *shared, "--out", "single", "--valid", "chats.jsonl", "--set", "data.packing=none")
    for run in ("packed", "single"):
        both = [
            json.loads(succeed(cli, "evaluate", run, "--json", *words).out)["loss"]
            for words in ((), ("--data", "chats.jsonl"))
        ]
        assert both[0] == pytest.approx(both[1], abs=1e-6)
    weights = succeed(cli, "evaluate", "assistant", "--data", "chats.jsonl").out
    assert "loss" in weights and "accuracy" in weights and "perplexity" in weights


def test_a_resumed_run_repeats_an_uninterrupted_one(cli: Cli) -> None:
    words = ("train", "--init-from", "base", "--objective", "chat", "--data", "chats.jsonl")
    sets = ("--set", "training.save_every=2", "--set", "training.eval_every=2")
    succeed(cli, *words, *sets, "--max-steps", 4, "--out", "whole")
    succeed(cli, *words, *sets, "--max-steps", 4, "--out", "halves", "--max-minutes", 1e-9)
    succeed(cli, "train", "--resume", "--out", "halves", "--max-steps", 4)
    one, two = (json.loads(succeed(cli, "evaluate", run, "--json").out)["loss"] for run in ("whole", "halves"))
    assert one == two


def test_adapters_learn_conversations(cli: Cli, talk: Cli) -> None:
    words = ("train", "--init-from", "base", "--objective", "chat", "--data", "chats.jsonl", "--max-steps", 2)
    succeed(cli, *words, "--lora", 2, "--out", "adapted")
    assert succeed(cli, "generate", "adapted", "--chat", "--prompt", "say a").code == 0
    outcome = talk(["say a"], "adapted")
    assert outcome.code == 0 and "without a chat template" not in outcome.err
    assert "without a chat template; messages are given in 'chatml'" in talk(["say a"], "base").err


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--objective", "chat"), "chat has no built-in data", "--data FILE.jsonl"),
        (("--objective", "chat", "--data", "recipe.yaml"), "conversations are read from .jsonl and .parquet", ""),
        (
            (*CHATS, "--set", "data.format=messages"),
            "expected the keys messages, or conversations, found prompt, completion",
            "",
        ),
        ((*CHATS, "--set", "data.format=chatml"), "data.format", ""),
        ((*CHATS, "--set", "tokenizer.chat_template=x"), "tokenizer.chat_template", ""),
        ((*CHATS, "--set", "tokenizer.chat_template=x.jinja"), "x.jinja", ""),
        ((*CHATS, "--set", "tokenizer.chat_template=raises.jinja"), "the chat template refuses these messages: no", ""),
        ((*CHATS, "--set", "tokenizer.chat_template=bomb.jinja"), "takes too long or writes too much", "chatml"),
        ((*CHATS, "--set", "tokenizer.chat_template=broken.jinja"), "the chat template, line 1: ", ""),
        (("--data", "chats.jsonl", "--set", "data.format=messages"), "reads no conversations", "--objective chat"),
        ((*CHATS, "--set", "data.seq_len=2"), "is left", "data.overlong"),
        ((*CHATS, "--set", "data.subword_sampling=0.1"), "subword_sampling", ""),
        (("--objective", "chat", "--source", "chats.jsonl", "--target", "chats.jsonl"), "chat does not read pairs", ""),
    ],
)
def test_wrong_trainings_are_refused(words: tuple[str, ...], message: str, hint: str, cli: Cli) -> None:
    Path("raises.jinja").write_text("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}")
    Path("bomb.jinja").write_text("{{ 'x' * 2000000000 }}")
    Path("broken.jinja").write_text("{% for %}")
    outcome = cli("train", "--init-from", "base", *words, "--out", "new")
    assert outcome.code == 2 and message in outcome.err and hint in outcome.err
    assert not Path("new").exists()


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_pipe_gives_one_answer_for_each_message(talk: Cli) -> None:
    lines = [line for asked, _ in QUESTIONS for line in (asked, "/reset")]
    outcome = talk(lines, "assistant", "--greedy")
    assert outcome.code == 0 and outcome.out.split() == [answer for _, answer in QUESTIONS], outcome.err


def test_history_is_read_and_saved(talk: Cli, folder: Path, cli: Cli) -> None:
    lines = ["say a", "", "say b", "/save talk.jsonl", "/system be brief", "say c", "/save talk.jsonl"]
    outcome = talk(lines, "assistant")
    assert outcome.code == 0, outcome.err
    first, second = (json.loads(line)["messages"] for line in Path("talk.jsonl").read_text().splitlines())
    assert [message["role"] for message in first] == ["user", "assistant"] * 2
    assert second[0] == {"role": "system", "content": "be brief"} and len(second) == 3
    words = ("--init-from", "base", "--objective", "chat", "--data", "talk.jsonl", "--valid", "talk.jsonl")
    succeed(cli, "train", *words, "--max-steps", 1, "--out", "again")


def test_saving_keeps_what_a_file_has(talk: Cli) -> None:
    Path("talk.jsonl").write_text('{"text": "x"}')  # without an end of line
    assert talk(["say a", "/save talk.jsonl"], "assistant").code == 0
    first, second = map(json.loads, Path("talk.jsonl").read_text().splitlines())
    assert first == {"text": "x"} and len(second["messages"]) == 2
    for name, content in (("notes.txt", b"my notes\n"), ("model.bin", b"\xff\xfe\0")):
        Path(name).write_bytes(content)
        outcome = talk(["say a", f"/save {name}"], "assistant")
        assert outcome.code == 2 and f"/save '{name}' is a file of another kind" in outcome.err
        assert Path(name).read_bytes() == content
    outcome = talk(["say a", "/reset", "/save new.jsonl"], "assistant")
    assert outcome.code == 2 and "no answer to save" in outcome.err and not Path("new.jsonl").exists()
    assert "is a directory" in talk(["say a", "/save ."], "assistant").err


def test_exit_ends_and_an_unknown_command_is_refused(talk: Cli) -> None:
    assert talk(["/exit", "say a"], "assistant").out == ""
    outcome = talk(["/what"], "assistant")
    assert outcome.code == 2 and "unknown command /what" in outcome.err and "/reset" in outcome.err
    assert talk(["/save"], "assistant").code == 2 and talk(["/save ."], "assistant").code == 2
    assert len(talk([" /exit", "say a"], "assistant").out.splitlines()) == 2  # a space makes it a message
    outcome = talk(["say " * 80], "assistant")
    assert outcome.code == 2 and "the model reads 64" in outcome.err


def test_old_messages_are_forgotten_where_the_context_is_full(talk: Cli) -> None:
    outcome = talk(["say a"] * 8, "assistant", "--system", "s")
    assert outcome.code == 0 and "no longer reads the first" in outcome.err
    [loaded] = load_models(options := GenerateOptions(("assistant",), "", chat=True, system="s"))
    sampler = make_writer(options, [loaded], on_cut=lambda *_: None)
    assert isinstance(sampler, Sampler)
    conversation = ChatSession(sampler)
    for _ in range(8):
        conversation.answer("say a")
    assert conversation.forgotten and conversation.messages[0]["content"] == "s" and len(conversation.messages) == 17


def test_an_answer_that_is_interrupted_is_kept_as_far_as_it_goes() -> None:
    [loaded] = load_models(options := GenerateOptions(("assistant",), "", chat=True))
    sampler = make_writer(options, [loaded], on_cut=lambda *_: None)
    assert isinstance(sampler, Sampler)
    conversation = ChatSession(sampler)
    assert conversation.answer("say a", should_stop=lambda: True) == ""
    assert [message["content"] for message in conversation.messages] == ["say a", ""]
    assert conversation.answer("say a") == "a"


def test_generate_answers_single_messages(cli: Cli) -> None:
    assert succeed(cli, "generate", "assistant", "--chat", "--prompt", "say b", "--greedy").out == "b\n"
    Path("asked.txt").write_text("".join(f"{asked}\n" for asked, _ in QUESTIONS))
    outcome = succeed(cli, "generate", "assistant", "--chat", "--input", "asked.txt", "--greedy")
    assert outcome.out.split() == [answer for _, answer in QUESTIONS]
    found = json.loads(succeed(cli, "generate", "assistant", "--chat", "--prompt", "say c", "--greedy", "--json").out)
    assert found["text"] == "c" and found["finish_reason"] == "eos"
    assert tformer.load("assistant").generate("say d", chat=True, greedy=True).text == "d"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chat", "missing"), "missing"),
        (("chat", "assistant", "--greedy", "--temperature", "1"), "exclude each other"),
    ],
)
def test_wrong_uses_are_refused(words: tuple[str, ...], message: str, cli: Cli) -> None:
    outcome = cli(*words)
    assert outcome.code == 2 and message in outcome.err


def test_without_a_name_the_newest_decoder_alone_answers(talk: Callable[..., Any]) -> None:
    shutil.copytree("assistant", "runs/assistant")
    heads = "{d_model: 8, max_seq_len: 8, encoder: {num_layers: 1, num_heads: 2}, heads: [{kind: masked_lm}]}"
    recipe = f"schema: 1\nmodel: {heads}\nobjectives: [{{kind: masked_lm}}]\n"
    random_run(Path("runs"), recipe, arch="bert", letters="abc ", template="bert")
    outcome = talk(["a"], "--greedy", "--max-new-tokens", 2)
    assert outcome.code == 0 and "chatting with runs/assistant/" in outcome.err, outcome.err


@pytest.fixture
def terminal(folder: Path) -> Callable[..., tuple[int, str]]:
    """`terminal(run, *steps)`: (exit code, output) of a chat on a terminal of 40 columns.

    A step is (pattern, typed): once it matches the output after the last step, `typed` is entered.
    """

    def talk(run: str, *steps: tuple[str, str]) -> tuple[int, str]:
        master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "tformer", "chat", run, "--greedy", "--max-new-tokens", "100000"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        os.close(terminal)
        output, begin, left = "", 0, list(steps)
        with suppress(OSError):  # the command has closed the terminal
            while part := os.read(master, 1 << 16):
                output += part.decode(errors="replace")
                if left and re.search(left[0][0], output[begin:]):
                    begin, (_, typed) = len(output), left.pop(0)
                    if set(typed) == {"\x03"}:  # this terminal controls no process, so it sends no signal
                        for _ in typed:
                            time.sleep(0.2)  # `input` waits for a key: Python's misses a signal that comes before
                            process.send_signal(signal.SIGINT)
                    else:
                        os.write(master, typed.encode(errors="surrogateescape"))
        os.close(master)
        return process.wait(), output.replace("\r", "")

    return talk


def test_a_terminal_shows_answers_and_goes_on_after_a_mistake(terminal: Any) -> None:
    code, output = terminal("assistant", ("> ", "/what\n"), ("> ", "say d\n"), ("\nd\r\n> ", "\x04"))
    assert code == 0 and "unknown command /what" in output and "/reset, /system, /save, /exit" in output
    assert "\nd\n> " in output and "\x1b[3" not in output


@pytest.mark.slow
def test_a_terminal_keeps_the_conversation_where_a_file_or_a_message_cannot_be_used(terminal: Any) -> None:
    steps = (("> ", "say d\n"), ("\nd\r\n> ", "/save /dev/full\n"), ("> ", "\udcff\n"), ("> ", "/save talk.jsonl\n"))
    code, output = terminal("assistant", *steps, ("> ", "\x04"))
    assert code == 0 and "cannot write /dev/full: No space left" in output
    assert [each["content"] for each in json.loads(Path("talk.jsonl").read_text())["messages"]] == ["say d", "d"]


@pytest.mark.slow
def test_an_interrupted_answer_leaves_the_conversation(terminal: Any) -> None:
    steps = (("> ", "say a\n"), ("say a\r\n\\s*\\w", "\x03"), ("> ", "/save talk.jsonl\n"), ("> ", "/exit\n"))
    code, output = terminal("base", *steps)
    assert code == 0, output
    saved = json.loads(Path("talk.jsonl").read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] and saved[0]["content"] == "say a"


@pytest.mark.slow
def test_ctrl_c_at_the_prompt_clears_the_line_says_once_how_to_leave_and_keeps_the_conversation(terminal: Any) -> None:
    interrupts = (("say b", "\x03"), ("> ", "\x03"), ("> ", "/save talk.jsonl\n"))
    code, output = terminal("assistant", ("> ", "say d\n"), ("\nd\r\n> ", "say b"), *interrupts, ("> ", "\x04"))
    assert code == 0 and output.count("Ctrl-D or /exit ends the conversation") == 1, output
    assert [each["content"] for each in json.loads(Path("talk.jsonl").read_text())["messages"]] == ["say d", "d"]


@pytest.mark.slow
def test_two_ctrl_c_end_the_answer_and_not_the_conversation(terminal: Any) -> None:
    steps = (
        ("> ", "say a\n"),
        ("say a\r\n\\s*\\w", "\x03\x03"),
        ("> (?s:.*)> ", "/save talk.jsonl\n"),
        ("> ", "/exit\n"),
    )
    code, output = terminal("base", *steps)
    assert code == 0 and len(json.loads(Path("talk.jsonl").read_text())["messages"]) == 2, output


def test_long_answers_are_broken_between_words() -> None:
    text = "a very long answer with a word_that_does_not_fit and\n\n  an indented line"
    for width in (10, 20, 40, 200):
        for size in (1, 3, len(text)):
            written: list[str] = []
            lines = WordWrapper(written.append, width)
            for start in range(0, len(text), size):
                lines.push(text[start : start + size])
            lines.push("\n")
            found = "".join(written)
            assert all(len(line) <= width or " " not in line.strip() for line in found.splitlines())
            assert found.split() == text.split() and found.endswith("\n")
            assert width < 200 or found == text + "\n"


# --- exchange ---------------------------------------------------------------------------------------------------------


def test_templates_go_out_and_come_back(cli: Cli) -> None:
    transformers = pytest.importorskip("transformers")
    succeed(cli, "export", "assistant", "--out", "hf")
    own = ChatTemplate(tformer.load("assistant").tokenizer, "chatml")  # type: ignore[arg-type]
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    messages = [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}]
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert found["input_ids"] == own.examples(messages)[0].ids
    assert found["assistant_masks"] == own.examples(messages)[0].answers.astype(int).tolist()
    succeed(cli, "import", "hf", "--out", "back")
    back = tformer.load("back")
    assert back.tokenizer is not None
    template = ChatTemplate(back.tokenizer, back.recipe.tokenizer.chat_template)
    assert template.examples(messages)[0].ids == found["input_ids"]
    assert succeed(cli, "generate", "back", "--chat", "--prompt", "say b", "--greedy").out == "b\n"


@pytest.mark.parametrize("form", ["text", "list"])
def test_templates_of_older_folders_are_read(form: str, cli: Cli) -> None:
    succeed(cli, "export", "assistant", "--out", "hf")
    template = Path("hf/chat_template.jinja").read_text()
    Path("hf/chat_template.jinja").unlink()
    options = json.loads(Path("hf/tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": template}]
    options["chat_template"] = template if form == "text" else named
    Path("hf/tokenizer_config.json").write_text(json.dumps(options))
    assert tformer.load("hf").recipe.tokenizer.chat_template == template
    options["chat_template"] = 3
    Path("hf/tokenizer_config.json").write_text(json.dumps(options))
    outcome = cli("generate", "hf", "--chat", "--prompt", "x")
    assert outcome.code == 2 and "chat_template: found a number, expected text" in outcome.err
