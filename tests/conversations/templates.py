"""Chat templates of the kinds in use, and a tokenizer whose tokens are bytes and markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3.conversations.template import ChatTemplate

CHATML = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
Be brief.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA2 = """\
{%- if messages[0].role == 'system' -%}
  {%- set system = '<<SYS>>' + messages[0].content + '<</SYS>>' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{%- for m in rest -%}
  {%- if m.role == 'user' -%}
    <s>[INST] {{ (system if loop.first else '') + m.content }} [/INST]
  {%- else %} {{ m.content.strip() }} </s>{% endif -%}
{%- endfor -%}"""

LLAMA3 = """\
<s>{% for m in messages %}<|start|>{{ m.role }}<|end|>

{{ m.content.strip() }}<|eot|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""

MARKED = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user -%}
<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORCED_THINKING = """\
<s>{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}
{%- else %}<|assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif %}"""

TOOLS = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

NO_GENERATION_PROMPT = """\
{%- for m in messages %}{{ 'Q' if m.role == 'user' else 'A' }}: {{ m.content }}</s>
{% endfor %}"""

NO_END = """\
{%- for m in messages %}{{ 'User: ' if m.role == 'user' else 'Bot: ' }}{{ m.content }}

{% endfor %}
{%- if add_generation_prompt %}Bot: {% endif %}"""

COUNTING = """\
{%- for m in messages %}[{{ loop.index }}/{{ messages | length }}]{{ m.role }}:{{ m.content }}</s>
{%- endfor %}
{%- if add_generation_prompt %}[{{ messages | length + 1 }}/{{ messages | length + 1 }}]assistant:
{%- endif %}"""

SHOUTING = """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|start|>", "<|end|>", "<|eot|>"),
    *("<|user|>", "<|assistant|>", "<think>", "</think>"),
)


@dataclass(frozen=True)
class Kind:
    """A template and how its answers end."""

    template: str
    end: str = "<|im_end|>"


def chat_template(kind: Kind) -> ChatTemplate:
    """With a tokenizer of single bytes, so that text and tokens can be compared by eye."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token=kind.end,
        additional_special_tokens=list(_MARKERS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = kind.template
    return ChatTemplate(tokenizer, "toy")
