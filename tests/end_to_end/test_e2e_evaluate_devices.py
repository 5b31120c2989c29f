"""`evaluate --devices`: the report of one process, byte for byte, whatever the number of processes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Outcome
from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ
from tests.faults.killing import ends_within
from tests.quick import first_is_quick
from tformer.evaluation import lm
from tformer.kernels import library
from tformer.workers.worker import Worker

Cli = Callable[..., Outcome]
Runs = Callable[[str], Path]
MakeRun = Callable[..., Path]
Same = Callable[..., str]
Pairs = tuple[object, ...]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")

RATE = re.compile(r"(_per_second\"?:? )[0-9.e+]+")
LETTERS = "abcdefgh"


@pytest.fixture(autouse=True)
def _a_time_limit() -> Iterator[None]:
    with ends_within(60):
        yield


@pytest.fixture
def same(cli: Cli) -> Same:
    """`same(words)`: what `evaluate` writes in one process, which is what it writes in several, but for rates."""

    def run(*words: object, devices: int = 2) -> str:
        one, several = (cli("evaluate", *words, *more) for more in ((), ("--devices", devices)))
        assert one.code == 0, one.err
        assert several.code == 0, several.err
        assert RATE.sub(r"\1", several.out) == RATE.sub(r"\1", one.out)
        assert several.err == one.err
        return one.out

    return run


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    """Options that name sources and targets of several lengths."""
    texts = [LETTERS[row % 5 : row % 5 + 1 + row % 4] for row in range(13)]
    (tmp_path / "source.txt").write_text("\n".join(texts) + "\n")
    (tmp_path / "target.txt").write_text("\n".join(text[::-1] for text in texts) + "\n")
    return ("--source", tmp_path / "source.txt", "--target", tmp_path / "target.txt")


@first_is_quick("kind", ["single", "pair", "multi", "score", "image", "masked", "sentences", "electra"])
def test_several_processes_report_what_one_reports(kind: str, same: Same, encoder_run: Runs) -> None:
    """The masks of a batch depend on its number, and sums are added in the order of the batches."""
    more = ("--pseudo-perplexity",) if kind == "masked" else ()
    found = same(encoder_run(kind), "--batch-size", 2, "--json", *more, devices=3)
    assert '"examples": ' in found


@first_is_quick(
    ("data", "words"),
    [
        ("*.txt", ("--batch-size", 2, "--json")),
        ("a.txt", ("--batch-size", 1, "--stride", 5)),
        ("a.txt", ("--batch-size", 2, "--by", "position", "--json")),
    ],
)
def test_several_processes_read_the_windows_of_a_text_as_one(
    data: str, words: tuple[object, ...], same: Same, random_run: MakeRun, tmp_path: Path
) -> None:
    run = random_run(DECODER)
    for name, size in (("a", 120), ("b", 90)):
        (tmp_path / f"{name}.txt").write_text("".join(LETTERS[(7 * place * place) % 8] for place in range(size)))
    found = same(run, "--data", tmp_path / data, *words, devices=3 if "--stride" in words else 2)
    assert "bits_per_byte" in found or "--by" in words


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one command chooses stays for others of this process."""
    monkeypatch.setenv("TFORMER_KERNELS", "off")
    library.forget()
    yield
    library.forget()


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels")
def test_several_processes_translate_and_compare_as_one(same: Same, random_run: MakeRun, pairs: Pairs) -> None:
    """Loss, BLEU, chrF and exact matches, with their signatures.

    Its quick twin is `test_several_processes_report_what_one_reports`.
    """
    translator = random_run(SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")
    found = same(translator, *pairs, "--batch-size", 2, "--json")
    assert '"bleu": ' in found and '"loss": ' in found
    same(translator, *pairs, "--batch-size", 3, "--score", devices=3)


@pytest.mark.slow
def test_several_processes_score_continuations_as_one(same: Same, decoder: Path, pairs: Pairs) -> None:
    """Its quick twin is `test_several_processes_report_what_one_reports`."""
    assert len(same(decoder, *pairs, "--score").splitlines()) == 13


@pytest.mark.slow
def test_mistakes_are_written_once(same: Same, encoder_run: Runs, tmp_path: Path) -> None:
    """Its quick twin is `test_several_processes_report_what_one_reports`."""
    run, written = encoder_run("score"), tmp_path / "mistakes.tsv"
    same(run, "--batch-size", 2, "--mistakes", written)
    assert written.read_text().splitlines()[0].startswith("row\tlabel\tprediction")


@pytest.mark.slow
def test_fewer_batches_than_processes(same: Same, encoder_run: Runs) -> None:
    """Its quick twin is `test_several_processes_report_what_one_reports`."""
    same(encoder_run("single"), devices=3)


def test_an_error_in_the_data_is_one_message_without_a_rank(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_text("label\ttext\nanimal\tthe cat\nplant\tthe rose\n")
    outcome = cli("evaluate", encoder_run("single"), "--data", tmp_path / "bad.tsv", "--devices", 2)
    assert outcome.code == 2 and outcome.err.count("error: ") == 1
    assert f"{tmp_path}/bad.tsv:3" in outcome.err and "rank" not in outcome.err


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_without_a_report(
    cli: Cli, random_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its quick twin is `test_an_error_in_the_data_is_one_message_without_a_rank`."""
    run = random_run(DECODER)
    (tmp_path / "text.txt").write_text(LETTERS * 40)
    load_batch = lm.load_batch

    def interrupting(corpus: Any, batch: list[lm.Window], **options: Any) -> Any:
        if batch[0].start == 32:
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()
        return load_batch(corpus, batch, **options)

    monkeypatch.setattr(lm, "load_batch", interrupting)
    outcome = cli("evaluate", run, "--data", tmp_path / "text.txt", "--batch-size", 1, "--devices", 2)
    assert (outcome.code, outcome.out) == (130, "") and outcome.err.count("error: ") == 1


def test_standard_input_is_refused_for_several_processes(cli: Cli, decoder: Path) -> None:
    outcome = cli("evaluate", decoder, "--data", "-", "--devices", 2)
    assert outcome.code == 2 and "standard input can be read by one process only" in outcome.err


def test_a_process_that_works_alone_answers_one_item_after_the_other() -> None:
    """Nothing is read ahead: an answer is used before the next item is looked at."""
    seen: list[str] = []

    def items() -> Iterator[int]:
        for item in range(3):
            seen.append(f"item {item}")
            yield item

    for item, answer in Worker().divide(items(), lambda item: -item, should_stop=lambda: len(seen) > 4):
        seen.append(f"answer {answer} of {item}")
    assert seen == ["item 0", "answer 0 of 0", "item 1", "answer -1 of 1", "item 2"]


def test_workers_hold_the_answers_of_a_few_rounds_only() -> None:
    """Answers that all have taken leave the store."""
    import threading

    from torch.distributed import HashStore

    store, count, keys = HashStore(), 200, list[int]()
    results: dict[int, list[tuple[int, int]]] = {}

    def work(rank: int) -> None:
        worker = Worker(rank=rank, world_size=2, store=store)
        results[rank] = []
        for item, answer in worker.divide(range(count), lambda item: item * item):
            results[rank].append((item, answer))
            keys.append(store.num_keys())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = [(item, item * item) for item in range(count)]
    assert results == {0: expected, 1: expected}
    assert max(keys) <= 60
