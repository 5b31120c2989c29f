"""Where an answer ends: in training what generation stops at, for templates of every shape, also of tool calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tokenizer.chat_templates import CHATML, PUBLISHED, plain_of
from tests.tokenizer.test_chat_templates import TURNS, byte_tokenizer
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatTemplate
from tformer.tokenizer.special import SpecialIds

NAMES = ("<bos>", "</s>", "<user>", "<bot>", "<tool>", "<end>", "<call>", "<last>")
CALL = {"type": "function", "id": "a", "function": {"name": "weather", "arguments": {"day": 5}}}
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "no"},
]

ROLES = "{% for m in messages %}{{ {'user': '<user>', 'assistant': '<bot>', 'tool': '<tool>'}[m.role] }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + c.function.arguments | tojson + ']' }}{% endfor %}"
SHAPES = {
    # the next message ends an answer
    "next": (ROLES + "{{ m.content or '' }}" + CALLS + PROMPT, {"<user>", "<tool>"}),
    # the last answer alone has a thought
    "thought": (
        ROLES + "{% if m.role == 'assistant' and loop.last %}{{ '(thought)' }}{% endif %}{{ m.content or '' }}"
        + CALLS + "{{ '<end>' }}" + PROMPT, {"<end>"},
    ),
    # the prompt opens a thought, which the answers of rows have not
    "open thought": (
        ROLES + "{{ m.content or '' }}" + CALLS + "{{ '<end>' }}" + PROMPT.replace("'<bot>'", "'<bot>(think'"),
        {"<end>"},
    ),
    # the last answer, and a call, end with tokens of their own
    "own ends": (
        ROLES + "{{ m.content or '' }}" + CALLS
        + "{{ '<call>' if m.tool_calls else '<last>' if loop.last and m.role == 'assistant' else '<end>' }}" + PROMPT,
        {"<last>", "<call>"},
    ),
    # a token after the last turn
    "closed": (
        ROLES + "{{ m.content or '' }}" + CALLS + "{{ '<end>' }}"
        + PROMPT.replace("{% endif %}", "{% else %}{{ '</s>' }}{% endif %}"), {"<end>"},
    ),
    # no token ends anything
    "no token": (
        "{% for m in messages %}{{ m.role + ': ' + (m.content or '') }}" + CALLS + "{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", {"</s>"},
    ),
}  # fmt: skip


def template_of(source: str) -> ChatTemplate:
    tokenizer = Tokenizer.from_json(byte_tokenizer(NAMES).to_str())
    roles = SpecialIds(bos=tokenizer.token_id("<bos>"), eos=tokenizer.token_id("</s>"))
    return ChatTemplate(tokenizer.with_special(roles), source)


def answers(template: ChatTemplate, messages: Any) -> list[list[str]]:
    """The learned parts of each example, as text."""
    found = []
    for example in template.examples(messages):
        parts, before = list[list[int]](), False
        for token, is_learned in zip(example.ids, example.answers, strict=True):
            if is_learned:
                parts = parts if before else [*parts, []]
                parts[-1].append(token)
            before = is_learned
        found.append([template.tokenizer.decode(part, skip_special=False) for part in parts])
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("messages", [TURNS[:2], TURNS, CALLING[:2], CALLING])
def test_what_is_trained_last_is_what_generation_stops_at(shape: str, messages: Any) -> None:
    source, ends = SHAPES[shape]
    template = template_of(source)
    stops = {template.tokenizer.token(token) for token in template.ends}
    found = [answer for example in answers(template, messages) for answer in example]
    assert len(found) == sum(message["role"] == "assistant" for message in messages)
    assert stops >= ends and stops <= ends | {"</s>"}
    for answer in found:
        [end] = [end for end in ends if answer.endswith(end)]
        assert not any(stop in answer.removesuffix(end) for stop in stops)


@pytest.mark.parametrize("shape", SHAPES)
def test_examples_are_the_texts_of_transformers(shape: str) -> None:
    """Each is the text up to its last answer, with the token that ends it where the template leaves it out."""
    transformers = pytest.importorskip("transformers")
    source, ends = SHAPES[shape]
    own = {"bos_token": "<bos>", "eos_token": "</s>", "chat_template": source}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(NAMES), **own)
    template = template_of(source)
    for example, last in zip(reversed(template.examples(TURNS)), (4, 2), strict=False):
        expected = theirs.apply_chat_template(TURNS[:last], tokenize=True, return_dict=True)["input_ids"]
        text, found = (template.tokenizer.decode(ids, skip_special=False) for ids in (expected, example.ids))
        is_ended = shape not in ("next", "no token")
        assert example.ids == expected if is_ended else found in {text + end for end in ends}


def test_answers_that_are_written_in_another_way_once_others_follow_are_examples_of_their_own() -> None:
    template = template_of(SHAPES["thought"][0])
    content = [TURNS[1]["content"], TURNS[3]["content"]]
    assert answers(template, TURNS[:2]) == [[f"(thought){content[0]}<end>"]]
    assert answers(template, TURNS) == [[f"(thought){each}<end>"] for each in content]
    assert "(thought)30" not in template.tokenizer.decode(template.examples(TURNS)[0].ids)
    assert answers(template_of(SHAPES["next"][0]), TURNS) == [[f"{content[0]}<user>", f"{content[1]}<user>"]]


def test_blocks_of_answers_are_learned_with_the_token_that_ends_them() -> None:
    content = "{% generation %}{{ m.content }}{% endgeneration %}"
    ended, followed = (
        ROLES + "{% if m.role == 'assistant' %}" + content + "{% else %}{{ m.content }}{% endif %}" + end + PROMPT
        for end in ("{{ '\n<end>' }}", "")
    )
    first, second = TURNS[1]["content"], TURNS[3]["content"]
    assert answers(template_of(ended), TURNS) == [[f"{first}\n<end>", f"{second}\n<end>"]]
    assert answers(template_of(followed), TURNS) == [[f"{first}<user>", f"{second}<user>"]]
    assert answers(template_of(followed), TURNS[:3]) == [[f"{first}<user>"]]


# --- tool calls, roles and tools --------------------------------------------------------------------------------------

WRITTEN = '[weather{"day": 5}]'
FORMS = {
    "as they are": (CALLS, WRITTEN),
    "null is written": ("{{ m.content if not m.tool_calls }}{{ m.content if m.tool_calls }}" + CALLS, WRITTEN),
    "null is refused": ("{{ m.content + '' }}" + CALLS, WRITTEN),
    "null is asked for": ("{% if m.content is none %}" + CALLS + "{% endif %}", WRITTEN),
    "a text": (CALLS.replace(" | tojson", ""), WRITTEN),
    "keys": (
        "{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
        "{% endfor %}", "day=5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("arguments", [{"day": 5}, '{"day": 5}'])
@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_without_a_text_are_written_by_each_template(form: str, arguments: Any, content: Any) -> None:
    written, expected = FORMS[form]
    body = "{% if m.tool_calls %}" + written + "{% else %}{{ m.content }}{% endif %}"
    template = template_of(ROLES + body + "{{ '<end>' }}" + PROMPT)
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    messages = [CALLING[0], {**CALLING[1], "content": content, "tool_calls": [call]}, *CALLING[2:]]
    assert answers(template, messages) == [[f"{expected}<end>", "no<end>"]]


def test_the_built_in_templates_write_tools_and_their_calls() -> None:
    tokenizer = Tokenizer.from_json(byte_tokenizer(PUBLISHED["chatml"][3]).to_str())
    template = ChatTemplate(tokenizer, "chatml").with_tools([{"name": "weather"}])
    [example] = template.examples(CALLING)
    call = '<tool_call>\n{"name": "weather", "arguments": {"day": 5}}\n</tool_call>'
    turns = ('system\n[{"name": "weather"}]', "user\nrain?", f"assistant\n{call}", "tool\nsun", "assistant\nno")
    text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert tokenizer.decode(example.ids, skip_special=False) == text


def test_tools_are_given_to_the_template_as_transformers_does() -> None:
    template = template_of("{{ tools | length }}" + SHAPES["closed"][0])
    assert template.with_tools([1, 2]).text(TURNS[:1]).startswith("2<user>")
    with pytest.raises(InputError, match="the chat template writes no tools"):
        template_of(SHAPES["closed"][0]).with_tools([1])


UNKNOWN: dict[str, tuple[str, Any, str]] = {
    "a role": (plain_of(CHATML), {"role": "bot", "content": "x"}, "message 3: found the role 'bot', the chat template"),
    "calls": (plain_of(CHATML), CALLING[1], "message 3: the chat template writes no tool calls"),
    "a role that is left out": (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content + '<end>' }}{% endif %}{% endfor %}",
        {"role": "tool", "content": "x"},
        "message 3: found the role 'tool', the chat template knows system, user, assistant",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_a_template_does_not_write_is_refused(case: str) -> None:
    source, message, expected = UNKNOWN[case]
    tokenizer = Tokenizer.from_json(byte_tokenizer((*NAMES, *PUBLISHED["chatml"][3])).to_str())
    with pytest.raises(InputError) as error:
        ChatTemplate(tokenizer, source).examples([*TURNS[:2], message])
    assert error.value.message.startswith(expected) and "\n" not in error.value.message
    assert "tokenizer.chat_template" in (error.value.hint or "")


def test_a_role_that_the_template_names_is_accepted() -> None:
    source = plain_of(CHATML).replace("{% for", "{# 'ipython' #}{% for", 1)
    tokenizer = Tokenizer.from_json(byte_tokenizer(PUBLISHED["chatml"][3]).to_str())
    [example] = ChatTemplate(tokenizer, source).examples([*TURNS[:2], {"role": "ipython", "content": "zz"}])
    assert "ipython\nzz" in tokenizer.decode(example.ids)
