from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ksana.errors import ModelLoadError, RequestError
from ksana.text import ChatTemplate, FastTokenizer

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """
{%- if tools %}
    {{- 'tools: ' + (tools | tojson) + '\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {% generation %}
        {{- message.content }}
        {% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(count=0) %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% set ns.count = ns.count + 1 %}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

CHAT = [
    {"role": "user", "content": ' Is 1 < 2 & "3" > 2? é 你好 '},
    {"role": "assistant", "content": "Yes.\n", "tool_calls": None},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize("source", [LLAMA3, CHATML, MISTRAL])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"tools": [{"name": "<é>", "b": 1, "a": None}]}])
def test_equals_transformers(
    byte_level: FastTokenizer, source: str, add_generation_prompt: bool, kwargs: dict[str, Any]
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level._backend, bos_token="<s>", eos_token="</s>")
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.render(CHAT, add_generation_prompt, **kwargs) == reference.apply_chat_template(
        CHAT, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False, **kwargs
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0]['content'] + '!' }}")
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo!"


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    ChatTemplate("{{ messages[0].content }}").render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]


def test_refusal_of_the_template_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ChatTemplate(MISTRAL).render([{"role": "assistant", "content": "first"}])
    assert caught.value.status == 400
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[0].nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro loop() %}{{ loop() }}{% endmacro %}{{ loop() }}",
    ],
)
def test_whatever_a_template_raises_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="cannot render"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_malformed_messages_are_named(messages: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.param == param


def test_template_variables_of_the_server_cannot_be_set() -> None:
    with pytest.raises(RequestError, match="must not set messages"):
        ChatTemplate("x").render([{"role": "user", "content": ""}], messages=[])


def test_broken_template_is_the_operators_matter() -> None:
    with pytest.raises(ModelLoadError, match=r"not valid Jinja \(line 2\)"):
        ChatTemplate("\n{% if %}")


def test_date_function() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render([{"role": "user", "content": ""}])
    assert rendered.isdigit()
