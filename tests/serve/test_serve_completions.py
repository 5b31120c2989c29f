"""`/v1/completions`, `/v1/chat/completions` and `/v1/embeddings`: what the command line and the Python API give."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.random_runs import letters_tokenizer
from tests.serve.conftest import Server
from tformer.decoding.scheduler import TokenEvent
from tformer.serve.openai import chat_logprobs, legacy_logprobs
from tformer.tokenizer import Tokenizer

Runs = dict[str, Path]
COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def gpt(runs: Runs) -> tformer.Run:
    return tformer.load(runs["gpt"])


def frames(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = server.send(path, body | {"stream": True})
    assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/event-stream")
    *parts, end, rest = reply.body.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_a_greedy_completion_is_that_of_the_python_api(server: Server, gpt: tformer.Run) -> None:
    answer = server.ask(COMPLETE, prompt="abc", temperature=0, max_tokens=9)
    assert texts(answer) == [gpt.generate("abc", greedy=True, max_new_tokens=9).text]
    assert answer["object"] == "text_completion" and answer["model"] == "gpt-tiny-1"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_seeded_sample_is_that_of_the_command_line(server: Server, gpt: tformer.Run) -> None:
    body: dict[str, Any] = {"prompt": "fed", "seed": 7, "n": 3, "temperature": 1.3, "top_k": 5, "max_tokens": 6}
    expected = gpt.generate("fed", seed=7, num_samples=3, temperature=1.3, top_k=5, max_new_tokens=6)
    assert texts(server.ask(COMPLETE, **body)) == [each.text for each in expected.completions]


def test_prompts_may_be_texts_or_ids_one_or_several(server: Server, gpt: tformer.Run) -> None:
    given = ["abc", "fed a"]
    ids = [gpt.encode(text) for text in given]
    fixed: dict[str, Any] = {"temperature": 0, "max_tokens": 5}
    expected = [gpt.generate(text, greedy=True, max_new_tokens=5).text for text in given]
    for prompt, count in ((given, 2), (ids, 2), (given[0], 1), (ids[0], 1)):
        answer = server.ask(COMPLETE, prompt=prompt, **fixed)
        assert texts(answer) == expected[:count]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids[:count]))


def test_a_completion_has_16_tokens_by_default_and_the_context_ends_it(server: Server) -> None:
    by_default = server.ask(COMPLETE, prompt="a", ignore_eos=True)
    assert by_default["usage"]["completion_tokens"] == 16
    to_the_end = server.ask(COMPLETE, prompt="a" * 40, max_tokens=1000, ignore_eos=True)
    assert to_the_end["usage"]["completion_tokens"] == 48 + 1 - 40
    assert to_the_end["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("extra", [{}, {"n": 2, "seed": 3}, {"logprobs": 2, "temperature": 0}, {"echo": True}])
def test_the_parts_of_a_stream_add_up_to_the_whole(server: Server, extra: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": ["abc", "d é"], "seed": 1, "max_tokens": 7} | extra
    whole = server.ask(COMPLETE, **body)
    parts = frames(server, COMPLETE, **body, stream_options={"include_usage": True})
    assert parts[-1]["usage"] == whole["usage"] and not parts[-1]["choices"]
    assert len({part["id"] for part in parts}) == 1 and all(part["usage"] is None for part in parts[:-1])
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        if "logprobs" in extra:
            for key, values in choice["logprobs"].items():
                assert [value for each in own for value in each["logprobs"][key]] == values
        else:
            assert choice["logprobs"] is None


def test_a_stop_text_ends_a_completion_and_is_left_out(server: Server) -> None:
    fixed: dict[str, Any] = {"prompt": "abc", "seed": 2, "max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    [plain] = texts(server.ask(COMPLETE, **fixed))
    answer = server.ask(COMPLETE, **fixed, stop=[plain[4:6], "never"])
    assert texts(answer) == [plain[: plain.index(plain[4:6])]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    parts = frames(server, COMPLETE, **fixed, stop=plain[4:6])
    assert "".join(part["choices"][0]["text"] for part in parts) == plain[: plain.index(plain[4:6])]


def test_neighbours_in_the_batch_change_nothing(server: Server) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": "abcdefgh"[n:] + "a" * n, "max_tokens": 5 + 3 * n, "seed": n, "temperature": n % 2, "n": 1 + n % 3}
        for n in range(8)
    ]
    alone = [texts(server.ask(COMPLETE, **body)) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: texts(server.ask(COMPLETE, **body)), bodies * 2))
    assert together == alone * 2


def test_a_model_that_cannot_be_scheduled_is_served(server: Server, runs: Runs) -> None:
    run, name = tformer.load(runs["sliding"]), runs["sliding"].name
    expected = run.generate("abc", seed=3, num_samples=2, logprobs=True, max_new_tokens=9)
    body: dict[str, Any] = {"prompt": "abc", "seed": 3, "n": 2, "logprobs": True, "max_new_tokens": 9, "model": name}
    [found] = server.ask("/generate", **body)["results"]
    for sample, each in zip(found["samples"], expected.completions, strict=True):
        assert sample["text"] == each.text and sample["logprobs"] == pytest.approx(each.logprobs, abs=1e-4)
    parts = frames(server, COMPLETE, prompt="abc", model=name, temperature=0, max_tokens=9, echo=True, logprobs=1)
    greedy = run.generate("abc", greedy=True, max_new_tokens=9).text
    assert "".join(part["choices"][0]["text"] for part in parts) == "abc" + greedy


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_echo_has_the_log_probabilities_of_evaluation(server: Server, gpt: tformer.Run) -> None:
    answer = server.ask(COMPLETE, prompt="abcd", echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert (
        len(found["tokens"]) == 5 and found["tokens"][:4] == list("abcd") and found["text_offset"][:4] == [0, 1, 2, 3]
    )
    score = gpt.score("a", "bcd")
    assert sum(found["token_logprobs"][1:4]) == pytest.approx(score.logprob, abs=1e-4)
    assert texts(answer) == ["abcd" + gpt.generate("abcd", greedy=True, max_new_tokens=1).text]


def test_a_token_is_among_its_own_alternatives(server: Server, gpt: tformer.Run) -> None:
    body: dict[str, Any] = {"prompt": [gpt.encode("abcdefgh a")], "echo": True, "logprobs": 1, "max_tokens": 1}
    found = server.ask(COMPLETE, **body, temperature=0)["choices"][0]["logprobs"]
    triples = list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))[1:]
    assert all(top[token] == logprob for token, logprob, top in triples)
    assert triples[-1][1] == max(triples[-1][2].values())  # greedy


def test_the_bytes_of_a_character_that_spans_tokens_add_up() -> None:
    tokenizer = letters_tokenizer("abc", "gpt", model="byte-bpe", vocab_size=260)
    entries = [chat_logprobs(tokenizer, TokenEvent(0, token, "", -1.0, (), None)) for token in tokenizer.encode("é€")]
    assert len(entries) == 5 and b"".join(bytes(each["bytes"]) for each in entries).decode() == "é€"
    assert all(each["token"] for each in entries)


def test_an_id_that_no_token_has_is_an_empty_text() -> None:
    document = json.loads(letters_tokenizer("abc", "gpt").to_json())
    document["model"]["vocab"]["c"] += 2
    tokenizer = Tokenizer.from_json(json.dumps(document))
    free = tokenizer.vocab_size - 2
    assert chat_logprobs(tokenizer, TokenEvent(0, free, "", -1.0, ((free, -1.0),), None))["token"] == ""
    [found] = legacy_logprobs(tokenizer, [TokenEvent(0, free, "", -1.0, ((free - 1, -2.0),), None)], 0)["top_logprobs"]
    assert found == {"": -1.0, f"token_id:{free - 1}": -2.0}


def test_echo_without_new_tokens_gives_the_prompt(server: Server) -> None:
    answer = server.ask(COMPLETE, prompt=["abc", "d"], echo=True, max_tokens=0)
    assert texts(answer) == ["abc", "d"] and answer["usage"]["completion_tokens"] == 0


def test_lm_eval_finds_the_log_likelihoods_of_the_model(
    server: Server, gpt: tformer.Run, runs: Runs, tmp_path: Path
) -> None:
    for package in ("lm_eval", "aiohttp", "tenacity", "transformers"):
        pytest.importorskip(package)
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tformer.evaluation.harness_model import HarnessModel
    from tformer.interop.exporting import export_checkpoint
    from tformer.interop.opening import open_checkpoint

    exported = tmp_path / "exported"
    export_checkpoint(open_checkpoint(runs["gpt"]), exported)  # for its tokenizer
    model: dict[str, Any] = {"model": "gpt-tiny-1", "tokenizer": str(exported), "batch_size": 3}
    api = LocalCompletionsAPI(base_url=server.url + COMPLETE, tokenizer_backend="huggingface", **model)
    given = [("abc", "de"), ("h", "a"), ("fed a", "bcdefgh"), ("ab", "aaa"), ("c", " .?")]
    requests = [(pair, gpt.encode(pair[0]), gpt.encode(pair[1])) for pair in given]
    found = api._loglikelihood_tokens(requests)
    expected = HarnessModel(gpt)._loglikelihood_tokens(requests)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], abs=1e-4)


# --- chat -------------------------------------------------------------------------------------------------------------


CHAT = "/v1/chat/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "temperature": 0}


def test_a_chat_answer_is_that_of_the_command(server: Server, gpt: tformer.Run) -> None:
    expected = gpt.generate("abc", chat=True, greedy=True, max_new_tokens=6).text
    answer = server.ask(CHAT, **TALK)
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == expected
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]}]
    assert server.ask(CHAT, **TALK | {"messages": in_parts})["choices"] == answer["choices"]


def test_a_chat_stream_begins_with_the_role_and_adds_up(server: Server) -> None:
    body = TALK | {"n": 2, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = server.ask(CHAT, **body)
    first, second, *parts = frames(server, CHAT, **body)
    for index, part in enumerate((first, second)):
        choice = part["choices"][0]
        assert choice["index"] == index and choice["delta"] == {"role": "assistant", "content": ""}
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(each["delta"].get("content", "") for each in own) == choice["message"]["content"]
        scored = [entry for each in own if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert scored == choice["logprobs"]["content"]
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == choice["finish_reason"]


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt", "masked", "labels", "pairs"])
def test_embeddings_are_those_of_the_python_api(server: Server, runs: Runs, family: str) -> None:
    run, given = tformer.load(runs[family]), ["abc", "fed a"]
    answer = server.ask("/v1/embeddings", input=given, model=runs[family].name)
    found = [each["embedding"] for each in answer["data"]]
    np.testing.assert_allclose(found, run.embed(given), atol=1e-5)
    as_text = server.ask("/v1/embeddings", input=given, model=runs[family].name, encoding_format="base64")
    for vector, each in zip(found, as_text["data"], strict=True):
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"), np.float32(vector))
    assert answer["usage"]["prompt_tokens"] == sum(len(run.encode(text)) for text in given)
    short = server.ask("/v1/embeddings", input="abc", model=runs[family].name, dimensions=3)
    assert len(short["data"][0]["embedding"]) == 3


# --- the official client ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_official_client_completes_and_streams(client: Any, gpt: tformer.Run) -> None:
    fixed: dict[str, Any] = {"model": "gpt-tiny-1", "prompt": "abc", "max_tokens": 6, "temperature": 0}
    expected = gpt.generate("abc", greedy=True, max_new_tokens=6).text
    assert client.completions.create(**fixed).choices[0].text == expected
    parts = list(client.completions.create(**fixed, stream=True))
    assert "".join(part.choices[0].text for part in parts) == expected
    scored = client.completions.create(**fixed, logprobs=2).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == 6


def test_the_official_client_chats_and_streams(client: Any) -> None:
    fixed = TALK | {"model": "gpt-tiny-1"}
    answer = client.chat.completions.create(**fixed, logprobs=True, top_logprobs=2).choices[0]
    assert bytes(answer.logprobs.content[0].bytes).decode() == answer.logprobs.content[0].token
    parts = list(client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True}))
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == answer.message.content
    assert parts[-1].usage.completion_tokens == 6


def test_the_official_client_embeds_and_lists_models(client: Any, gpt: tformer.Run) -> None:
    found = client.embeddings.create(model="gpt-tiny-1", input=["abc", "d"])
    np.testing.assert_allclose([each.embedding for each in found.data], gpt.embed(["abc", "d"]), atol=1e-5)
    assert next(each.id for each in client.models.list()) == "gpt-tiny-1"
    assert client.models.retrieve("gpt-tiny-1").owned_by == "tformer"


def test_the_official_client_knows_the_errors(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="none", prompt="abc")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="gpt-tiny-1", prompt="abc", temperature=-1)
    assert refused.value.param == "temperature"
