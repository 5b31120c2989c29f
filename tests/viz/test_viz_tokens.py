"""Sizes of the page and contents of the picture of `tformer viz-tokens`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.viz.token_reports import token_report
from tformer.support.errors import InputError
from tformer.viz.tokens import as_page, plots_of


@pytest.mark.parametrize(("tokens", "top", "megabytes"), [(64, 5, 1), (512, 100, 20), (10_000, 5, 20)])
def test_pages_are_small(tokens: int, top: int, megabytes: float) -> None:
    report = token_report([f" {number}" for number in range(tokens)], top=top)
    assert len(as_page([report, report] if tokens < 1000 else [report], hardest=20).encode()) < megabytes * 1e6


def test_rows_of_a_picture_begin_with_the_position_of_their_first_token() -> None:
    report = token_report([f" {number}" for number in range(170)])
    *texts, calibration = plots_of([report])
    assert [list(plot.rows) for plot in texts] == [[str(8 * n) for n in range(20)], ["160", "168"]]
    assert texts[1].words[1] == ["␣168", "␣169", *[""] * 6] and texts[1].values[1, 1] == report.bits[169]
    assert np.isnan(texts[1].values[1, 2:]).all() and calibration.title == "Calibration"


def test_a_page_that_is_too_large_is_refused_with_the_flag_that_helps() -> None:
    with pytest.raises(InputError, match=r"a page of .* MB does not fit into 0\.01 MB") as caught:
        as_page([token_report(["a", "b"])], hardest=1, max_bytes=1e4)
    assert "--top-k" in str(caught.value.hint)
