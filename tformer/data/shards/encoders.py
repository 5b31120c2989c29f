"""Batches of text as token ids, in order: encoded in this process, or by several worker processes.

The workers are forked, so that they start at once and share the tokenizer, and encode with one thread each. Batch i
goes to worker i modulo their number, which has at most `AHEAD` batches at a time: memory does not grow with the text,
and the result does not depend on the number of workers. They end with this process, however it ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

import numpy as np

from tformer.data.shards.token_files import token_dtype
from tformer.data.sources.files import DocumentChunk
from tformer.support.errors import InputError, OutOfMemoryError, TformerError
from tformer.support.processes import available_cores, end_with_parent
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import BATCH_CHARACTERS, batches_of

FEW_BATCHES = 8  # of a megabyte: this process encodes fewer of them faster than workers
AHEAD = 2  # batches of a worker: one that it encodes, and the next
ENCODED_AT_ONCE = 1 << 17  # characters, which take 100 to 300 bytes each
THREADS = "TOKENIZERS_PARALLELISM"  # read by the tokenizers library at each batch

Encoded = tuple[list[DocumentChunk], np.ndarray, np.ndarray]
"""A batch of pieces, the ids of all of them, and the number of ids of each."""


def encoded_batches(
    batches: Iterator[list[DocumentChunk]], tokenizer: Tokenizer, *, workers: int | None = None
) -> Iterator[Encoded]:
    """The batches with their ids, in order.

    Args:
        workers: number of processes that encode. With 1, this process encodes in one thread. With None, there are as
            many as processors, but a short text is encoded by this process with all its threads.

    Raises InputError for an id outside the vocabulary; TformerError when a worker is killed; what `batches` raises.
    """
    first = list(islice(batches, FEW_BATCHES))
    batches = chain(first, batches)
    count = workers
    if count is None:
        count = available_cores() if sys.platform == "linux" else 1  # forking is safe on Linux only
    all_threads = workers is None and len(first) < FEW_BATCHES
    if all_threads or count == 1:
        for batch in batches:
            with nullcontext() if all_threads else single_threaded():
                found = encode(tokenizer, [piece.text for piece in batch])
            yield batch, *found
    else:
        with ExitStack() as stack:
            processes = [stack.enter_context(closing(_Worker(tokenizer))) for _ in range(count)]
            waiting: deque[tuple[list[DocumentChunk], _Worker]] = deque()
            for number, batch in enumerate(batches):
                if len(waiting) == AHEAD * count:
                    done, worker = waiting.popleft()
                    yield done, *worker.receive()
                worker = processes[number % count]
                worker.send([piece.text for piece in batch])
                waiting.append((batch, worker))
            for done, worker in waiting:
                yield done, *worker.receive()


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], *, at_once: int = BATCH_CHARACTERS
) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all texts, in the format of token files; number of ids of each). Errors: an id outside the vocabulary."""
    encoded = [ids for batch in batches_of(texts, len, size=at_once) for ids in tokenizer.encode_batch(batch)]
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    ids = np.fromiter(chain.from_iterable(encoded), dtype=np.int64, count=int(lengths.sum()))
    return as_token_ids(ids, tokenizer), lengths


def as_token_ids(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """The ids in the format of token files. Errors: an id outside the vocabulary."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer gives ids from {ids.min()} to {ids.max()}, its vocabulary has {tokenizer.vocab_size} tokens"
        )
    return ids.astype(token_dtype(tokenizer.vocab_size))


@contextmanager
def single_threaded() -> Iterator[None]:
    """The tokenizers library works in the thread that calls it, also in processes forked here."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


# -- worker processes --------------------------------------------------------------------------------------------------


class _Worker:
    """A forked process that encodes texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._connection, far_end = Pipe()
        parent = os.getpid()
        with single_threaded():  # the threads of the library are not in the child
            try:
                self._pid = os.fork()
            except OSError as error:
                raise OutOfMemoryError(
                    f"the system starts no further process: {error.strerror}",
                    hint="give fewer --workers, or raise the limits of memory and processes (ulimit -v, ulimit -u)",
                ) from error
            if self._pid == 0:
                try:
                    number = far_end.fileno()  # a lock on the cache must end with the parent
                    os.closerange(3, number)
                    os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))
                    _work(far_end, tokenizer, parent)
                finally:
                    os._exit(0)
        far_end.close()

    def send(self, texts: Sequence[str]) -> None:
        try:
            self._connection.send(texts)
        except OSError:
            raise self._ended() from None

    def receive(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, lengths) of the texts that were sent first. Raises what `encode` raised in the worker."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(answer, Exception):
            raise answer
        ids, lengths = answer
        return ids, lengths

    def _ended(self) -> TformerError:
        code = self._wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return TformerError(
            f"a process that tokenizes the text was ended {how}",
            hint="run the command again: it goes on where it was; with too little memory, give fewer --workers",
        )

    def close(self) -> None:
        self._connection.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()

    def _wait(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)


def _work(connection: Connection, tokenizer: Tokenizer, parent: int) -> None:
    """The worker: answer what arrives with ids and lengths, or with an error to raise, until the connection ends."""
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent handles a signal to the group, and ends this process
    received: SimpleQueue[list[str] | None] = SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                received.put(connection.recv())
        received.put(None)

    # A thread receives, so that the parent never waits for a worker that waits for the parent.
    threading.Thread(target=receive, daemon=True).start()
    with suppress(BrokenPipeError, ConnectionResetError):
        while (texts := received.get()) is not None:
            answer: object
            try:
                answer = encode(tokenizer, texts, at_once=ENCODED_AT_ONCE)
            except InputError as error:
                answer = error
            except BaseException:  # the library's panics do not derive from Exception
                answer = RuntimeError(traceback.format_exc())
            connection.send(answer)
