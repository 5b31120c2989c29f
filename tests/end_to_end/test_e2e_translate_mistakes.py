"""`tformer generate` with encoder-decoders and beams: every mistake of a user is one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.translate_runs import Cli, Run, refusal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n-best", 4], ["--n-best 4", "generation.beam_size 3"]),
        (["--n-best", 4, "--beam-size", 3], ["--n-best 4", "--beam-size 3"]),
        (["--n-best", 2, "--greedy"], ["--n-best 2", "--beam-size 1"]),
        (["--beam-size", 40], ["beam", "40", "vocabulary", "17"]),
        (["--beam-size", 0], ["beam_size", "0"]),
        (["--beam-groups", 2], ["2", "3"]),
        (["--stopping", "early"], ["--stopping", "exhaustive", "early"]),
        (["--length-penalty-type", "wu"], ["--length-penalty-type", "gnmt, avg or none", "wu"]),
        (["--coverage-penalty", "-1"], ["--coverage-penalty", "-1"]),
        (["--too-long", "drop"], ["--too-long", "error or cut", "drop"]),
        (["--length-margin", "-1"], ["--length-margin", "-1"]),
        (["--greedy", "--beam-size", 2], ["--greedy", "--beam-size 2"]),
        (["--temperature", 1, "--beam-size", 2], ["--temperature", "--beam-size"]),
        (["--num-samples", 2, "--n-best", 2, "--json"], ["--num-samples", "--n-best"]),
        (["--stop", "a"], ["--stop", "beam of 3"]),
        (["--stop", "a", "--beam-size", 2], ["--stop", "--beam-size"]),
        (["--target-prefix", "abX"], ["--target-prefix", "'abX'"]),
        (["--target-prefix", "a" * 16], ["--target-prefix", "16 tokens", "15"]),
        (["--target-prefix", "a", "--target-prefix-file", "b"], ["--target-prefix", "--target-prefix-file"]),
        (["--prompt", "a", "--target-prefix-file", "b"], ["--prompt", "--target-prefix-file"]),
        (["--target-prefix-file", "absent.txt"], ["absent.txt"]),
    ],
)
def test_a_users_mistake_is_one_clear_line(
    cli: Cli, translator: Run, lines: Path, options: list[object], words: list[str]
) -> None:
    given = () if "--prompt" in options else ("--input", lines)
    message = refusal(cli("generate", translator, *given, *options))
    assert all(word in message for word in words), message


def test_a_long_source_names_its_line_before_anything_is_written(cli: Cli, translator: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "long.txt", tmp_path / "out.txt"
    path.write_text("abc\n" * 50 + "abcdefgh" * 2 + "\n")
    out.write_text("precious")
    message = refusal(cli("generate", translator, "--input", path, "--output", out, "--batch-size", 1))
    assert "long.txt:51" in message and "18 tokens" in message and "16" in message
    assert out.read_text() == "precious"
    assert "18 tokens" in refusal(cli("generate", translator, "--prompt", "abcdefgh" * 2))


def test_a_long_source_loses_its_end_where_that_is_asked_for(cli: Cli, translator: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("abc\n" + "abcdefgh" * 2 + "\n")
    outcome = cli("generate", translator, "--input", path, "--too-long", "cut")
    assert outcome.code == 0 and "were cut: 1" in outcome.err
    kept = [cli("generate", translator, "--prompt", text).out for text in ("abc", "abcdefghabcdef")]
    assert outcome.out == "".join(kept)
    assert cli("generate", translator, "--prompt", "abcdefgh" * 2, "--too-long", "cut").out == kept[1]


def test_prefix_files_have_a_line_for_each_source_made_of_known_tokens(
    cli: Cli, translator: Run, lines: Path, tmp_path: Path
) -> None:
    prefixes = tmp_path / "prefixes.txt"
    common = ("generate", translator, "--input", lines, "--target-prefix-file", prefixes)
    prefixes.write_text("a\n" * 6)
    message = refusal(cli(*common))
    assert "7 lines" in message and " 6" in message and "prefixes.txt" in message
    prefixes.write_text("a\n" * 6 + "aX\n")
    assert "prefixes.txt:7" in refusal(cli(*common))


@pytest.mark.parametrize(
    "option", ["--coverage-penalty", "--length-margin", "--alignments", "--target-prefix", "--prefix", "--too-long"]
)
def test_options_about_sources_are_refused_by_a_decoder_alone(cli: Cli, decoder: Run, option: str) -> None:
    value = {"--alignments": [], "--too-long": ["cut"]}.get(option, ["1"])
    message = refusal(cli("generate", decoder, "--prompt", "a", option, *value))
    assert option in message and str(decoder) in message


def test_a_classifier_a_masked_model_and_a_model_of_images_say_what_they_are(
    cli: Cli, encoder_run: Callable[[str], Path]
) -> None:
    for kind in ("single", "image"):
        message = refusal(cli("generate", encoder_run(kind), "--prompt", "a", "--beam-size", 2))
        assert "classifier" in message
    message = refusal(cli("generate", encoder_run("masked"), "--prompt", "a [MASK]", "--beam-size", 2))
    assert "--beam-size" in message and "masks" in message


def test_two_runs_without_ensemble_are_a_mistake(cli: Cli, translator: Run) -> None:
    outcome = cli("generate", translator, "other", "--prompt", "a")
    assert "other" in refusal(outcome) and "--ensemble" in outcome.err
