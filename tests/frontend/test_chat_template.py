import pytest

from jaxinfer.frontend.chat_template import render_chat

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] }}{% endgeneration %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' -}}
{% endif %}
"""
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
TOOLS = """{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}
  {% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% set ns = namespace(n=0) %}{% for part in m.content %}{% set ns.n = ns.n + 1 %}{{ part.text }}{% endfor %}{{ ns.n }}
{% endfor %}{{ documents }}{{ mood | default('none') }}"""

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Größe <b>?</b>\n"},
    {"role": "assistant", "content": " 3 "},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "é'\"<"}, {"type": "text", "text": "b"}]}
] * 3
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"b": 1, "a": None}},
}


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, CHAT, {}),
        (CHATML, CHAT[:2], {"add_generation_prompt": True}),
        (CHATML, CHAT, {"continue_final_message": True}),
        (TRIMMED, CHAT, {"continue_final_message": True}),
        (TOOLS, PARTS, {"tools": [TOOL], "mood": "bright"}),
        (TOOLS, PARTS, {"documents": [{"title": "t", "text": "x"}]}),
        (TOOLS.replace("{{ m", "{# #}{{ m"), PARTS[:1], {}),
    ],
)
def test_renders_as_transformers_does(template, messages, options):
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=template, bos_token="<s>", **options
    )
    assert (
        render_chat(template, messages, special_tokens={"bos_token": "<s>"}, **options) == expected
    )


def test_continuing_parts_marks_the_last_text():
    template = (
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    text = render_chat(template, PARTS[:1], special_tokens={}, continue_final_message=True)
    assert text == "[é'\"<][b"
    assert PARTS[0]["content"][-1]["text"] == "b"


def test_strftime_now_knows_the_date():
    text = render_chat("{{ strftime_now('%Y') }}", CHAT, special_tokens={})
    assert len(text) == 4
    assert text.isdigit()


@pytest.mark.parametrize(
    ("template", "messages", "options", "message"),
    [
        ("x", [], {}, "messages must not be empty"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, {}, "roles must alternate"),
        ("{% if %}", CHAT, {}, "can't render"),
        ("{{ messages[0].content + 1 }}", CHAT, {}, "can't render these messages: TypeError"),
        ("{{ messages.append(1) }}", CHAT, {}, "can't render"),
        ("{{ ''.__class__.__mro__ }}", CHAT, {}, "can't render"),
        (
            TRIMMED,
            CHAT,
            {"continue_final_message": True, "add_generation_prompt": True},
            "exclude each",
        ),
        (TRIMMED, [{"role": "user"}], {"continue_final_message": True}, "final message with text"),
        ("nothing", CHAT, {"continue_final_message": True}, "drops or changes the final message"),
    ],
)
def test_what_can_not_be_rendered_is_a_value_error(template, messages, options, message):
    with pytest.raises(ValueError, match=message):
        render_chat(template, messages, special_tokens={}, **options)
