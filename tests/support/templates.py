"""Chat templates as models come with them, shortened: one of each style."""

from __future__ import annotations

__all__ = ["CHATML", "GENERATION", "LLAMA_2", "LLAMA_3", "PARTS", "QWEN", "TEMPLATES"]

CHATML = """\
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' %}
{%- set loop_messages = messages[1:] %}{%- set system = messages[0]['content'] %}
{%- else %}{%- set loop_messages = messages %}{%- set system = false %}{%- endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
{%- endif %}
{%- if loop.index0 == 0 and system %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{%- set content = message['content'] %}{%- endif %}
{%- if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if tools is not none %}
{{- "Environment: ipython\\n" }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool') %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
   + message['content'] | trim + '<|eot_id|>' }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
{{- "<|eot_id|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN = """\
{%- macro call(name, arguments) -%}
<tool_call>
{"name": "{{ name }}", "arguments": {{ arguments | tojson }}}
</tool_call>
{%- endmacro -%}
{%- set ns = namespace(last=messages|length - 1) %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not tools) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for one in message.tool_calls or [] %}
            {{- call(one.function.name, one.function.arguments) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

PARTS = """\
{%- for message in messages %}
<{{ message['role'] }}>
{%- if message['content'] is string %}[{{ message['content'] }}]
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}({{ part['text'] | trim }}){% endif %}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

GENERATION = """\
{%- for message in messages %}
{%- set who = message.role %}
{%- if who == 'assistant' %}
{% generation %}A: {{ message.content }} {{ who }}{% endgeneration %}
{%- else %}U: {{ message.content }}
{% endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "qwen": QWEN,
    "parts": PARTS,
    "generation": GENERATION,
}
