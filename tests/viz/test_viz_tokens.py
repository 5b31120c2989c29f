"""Sizes of the page of `tformer viz-tokens`."""

from __future__ import annotations

import pytest

from tests.viz.token_reports import token_report
from tformer.support.errors import InputError
from tformer.viz.tokens import as_page


@pytest.mark.parametrize(("tokens", "top", "megabytes"), [(64, 5, 1), (512, 100, 20), (10_000, 5, 20)])
def test_pages_are_small(tokens: int, top: int, megabytes: float) -> None:
    report = token_report([f" {number}" for number in range(tokens)], top=top)
    assert len(as_page([report, report] if tokens < 1000 else [report], hardest=20).encode()) < megabytes * 1e6


def test_a_page_that_is_too_large_is_refused_with_the_flag_that_helps() -> None:
    with pytest.raises(InputError, match=r"a page of .* MB does not fit into 0\.01 MB") as caught:
        as_page([token_report(["a", "b"])], hardest=1, max_bytes=1e4)
    assert "--top-k" in str(caught.value.hint)
