"""Chat templates in the forms of eight published models, with answers inside `{% generation %}` blocks.

`plain_of` is the same template without the blocks, as most models publish theirs.
"""

from __future__ import annotations

ANSWER = "{% generation %}@{% endgeneration %}"


def plain_of(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _answer(text: str) -> str:
    return ANSWER.replace("@", text)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    + _answer("{{ message['content'] + '<|im_end|>' }}")
    + "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    + _answer("{{ ' ' + content | trim + ' ' + eos_token }}")
    + "{% endif %}{% endfor %}"
)

LLAMA_3 = (
    "{% for message in messages %}"
    "{% set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}"
    "{% if loop.index0 == 0 %}{% set head = bos_token + head %}{% endif %}{{ head }}"
    "{% if message['role'] == 'assistant' %}"
    + _answer("{{ message['content'] | trim + '<|eot_id|>' }}")
    + "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] + '\\n\\n' %}\n"
    "    {%- set turns = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n"
    "    {%- set turns = messages %}\n{%- endif %}\n{{- bos_token }}\n{%- for message in turns %}\n"
    "    {%- if message['role'] == 'user' %}\n"
    "        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}\n"
    "    {%- elif message['role'] == 'assistant' %}\n        {%- generation %}\n"
    "        {{- ' ' + message['content'] | trim + eos_token }}\n        {%- endgeneration %}\n"
    "    {%- else %}\n        {{- raise_exception('unknown role') }}\n    {%- endif %}\n{%- endfor %}\n"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' }}"
    "{% if role == 'model' %}"
    + _answer("{{ message['content'] | trim + '<end_of_turn>' }}")
    + "{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    + _answer("{{ message['content'] + '<|end|>' }}")
    + "{{ '\\n' }}{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)

ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n' }}"
    + _answer("{{ message['content'] + eos_token }}")
    + "{{ '\\n' }}\n{% else %}\n{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)

QWEN = (
    "{%- if messages[0].role == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
    "{%- else %}\n    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role == 'system' and loop.first %}\n"
    "        {%- continue %}\n    {%- endif %}\n    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' %}\n        {%- generation %}\n"
    "        {{- message.content + '<|im_end|>' }}\n        {%- endgeneration %}\n    {%- else %}\n"
    "        {{- message.content + '<|im_end|>' }}\n    {%- endif %}\n    {{- '\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)

PUBLISHED = {
    "chatml": (CHATML, None, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama-2": (LLAMA_2, "<s>", "</s>", ("<s>", "</s>")),
    "llama-3": (
        LLAMA_3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": (MISTRAL, "<s>", "</s>", ("<s>", "</s>", "[INST]", "[/INST]")),
    "gemma": (GEMMA, "<bos>", "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "phi-3": (
        PHI_3,
        "<s>",
        "<|endoftext|>",
        ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    ),
    "zephyr": (ZEPHYR, "<s>", "</s>", ("<s>", "</s>")),
    "qwen": (QWEN, None, "<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")),
}
"""Name: (template, token that begins a text, token that ends one, all control tokens)."""
