"""Counts of a server, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the histograms of seconds."""

HELP = {
    "tformer_requests_total": ("counter", "Requests that were answered, by path and status."),
    "tformer_prompt_tokens_total": ("counter", "Tokens that were read."),
    "tformer_completion_tokens_total": ("counter", "Tokens that were written."),
    "tformer_request_seconds": ("histogram", "Seconds from a request to the end of its answer."),
    "tformer_first_token_seconds": ("histogram", "Seconds from a request to its first token."),
    "tformer_requests_running": ("gauge", "Requests that were begun and are not answered."),
    "tformer_rows_running": ("gauge", "Texts that are being written."),
    "tformer_model_bytes": ("gauge", "Bytes of the weights of each loaded model, in fp32."),
}
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters and histograms by name and labels. Any number of threads may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, Labels], float] = defaultdict(float)
        self._seconds: dict[tuple[str, Labels], list[float]] = defaultdict(lambda: [0.0] * (len(BOUNDS) + 2))

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts[name, tuple(labels.items())] += value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        with self._lock:
            found = self._seconds[name, tuple(labels.items())]
            found[bisect_left(BOUNDS, seconds)] += 1
            found[-1] += seconds

    def text(self, gauges: Mapping[tuple[str, Labels], float]) -> str:
        """All values as lines; `gauges` has the current values that are not counted here."""
        return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[tuple[str, Labels], float]) -> Iterator[str]:
        with self._lock:
            counts = {**self._counts, **gauges}
            seconds = {key: list(values) for key, values in self._seconds.items()}
        for name, (kind, text) in HELP.items():
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} {kind}"
            for (own, labels), value in counts.items():
                if own == name:
                    yield f"{name}{_shown(labels)} {value:.15g}"
            for (own, labels), values in seconds.items():
                if own == name:
                    total = 0.0
                    for bound, count in zip((*BOUNDS, "+Inf"), values, strict=False):
                        total += count
                        yield f"{name}_bucket{_shown((*labels, ('le', str(bound))))} {total:.15g}"
                    yield f"{name}_sum{_shown(labels)} {values[-1]:.15g}"
                    yield f"{name}_count{_shown(labels)} {total:.15g}"


def _shown(labels: Labels) -> str:
    escaped = ((name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels)
    inside = ",".join(f'{name}="{value}"' for name, value in escaped)
    return f"{{{inside}}}" if inside else ""
