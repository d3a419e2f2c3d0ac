"""Small chat templates in the style of each family of tool calls, for the tests of the parsers.

`FORMATS[name]` is the template whose calls the parser `name` reads. The calls of a reply are written by `written`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agentfly.render.parsers.detect import _access
from agentfly.render.parsers.probe import ParserProbe
from agentfly.types import ToolCall

_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def _chat(calls: str, *, prompt: str = "", before: str = "") -> str:
    """A template in the style of ChatML; `before` stands before the words of a reply."""
    return (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.role == 'assistant' and m.content %}}{before}{{% endif %}}{{{{ m.content or '' }}}}"
        f"{{% if m.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{prompt}{{% endif %}}"
    )


def _each(call: str, between: str = "") -> str:
    return f"{{% for c in m.tool_calls %}}{call}{{{{ {between!r} if not loop.last else '' }}}}{{% endfor %}}"


def _arguments(argument: str, between: str = "") -> str:
    return (
        "{% for k, v in c.function.arguments.items() %}"
        f"{argument}{{{{ {between!r} if not loop.last else '' }}}}{{% endfor %}}"
    )


_OBJECT = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
_COHERE = f'{{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{_NAME}", "parameters": {_ARGUMENTS}}}'
_RAW = "{{ v if v is string else v | tojson }}"
_INVOKE = f'<invoke name="{_NAME}">\n' + _arguments(f'<parameter name="{{{{ k }}}}">{_RAW}</parameter>\n') + "</invoke>"
_DSML_VALUE = (
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">" + _RAW + "</｜DSML｜parameter>\n"
)
_DSML = f'<｜DSML｜invoke name="{_NAME}">\n' + _arguments(_DSML_VALUE) + "</｜DSML｜invoke>\n"
_GEMMA_MACRO = (
    "{% macro show(v, quote) %}{% if v is string %}{{ quote }}{{ v }}{{ quote }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ k }}:{{ show(w, quote) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is boolean or v is number or v is none %}{{ v | tojson }}{% else %}["
    "{% for w in v %}{{ show(w, quote) }}{{ ',' if not loop.last }}{% endfor %}]{% endif %}{% endmacro %}"
)
_NEST_MACRO = (
    "{% set ns = ']<]minimax[>[' %}{% macro show(v) %}{% if v is mapping %}"
    "{% for k, w in v.items() %}{{ ns }}<{{ k }}>{{ show(w) }}{{ ns }}</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for w in v %}{{ ns }}<item>{{ show(w) }}{{ ns }}</item>{% endfor %}"
    "{% elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_MESSAGES = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}CALLS"
    "{% elif m.role == 'assistant' %}<|start|>assistantFINAL<|message|>{{ m.content }}<|eot|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{% if tools %}{% endif %}"
)
_HARMONY = _each(f"<|start|>assistant to=functions.{_NAME}<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>")
_ATEM = _INVOKE.replace("<", "<atem:").replace("<atem:/", "</atem:")
_MUSE = _each(f"<|start|>assistant to={_NAME}<|message|><atem:function_calls>\n{_ATEM}\n</atem:function_calls><|eot|>")
_RECIPIENTS = (
    "{% for m in messages %}<|head|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.content %}>>>all\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}<|head|>assistant\n>>>{% endif %}"
)
_GIGA = (
    "{% for m in messages %}{{ m.role }}<|role_sep|>\n{{ m.content }}<|message_sep|>\n\n{% for c in m.tool_calls or [] %}"
    f"function call<|role_sep|>\n{_OBJECT}<|message_sep|>\n\n{{% endfor %}}{{% endfor %}}"
    "{% if tools %}{% endif %}{% if add_generation_prompt %}assistant<|role_sep|>\n{% endif %}"
)
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI = f"<|tool_call_begin|>functions.{_NAME}:{{{{ loop.index0 }}}}<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>"
_SOLAR = f"<|tool_call:begin|>{{{{ c.id }}}}<|tool_call:name|>{_NAME}<|tool_call:args|>{_ARGUMENTS}<|tool_call:end|>"
_CODER = f"<function={_NAME}>\n" + _arguments("<parameter={{ k }}>\n" + _RAW + "\n</parameter>\n") + "</function>"
_SEED = f"<function={_NAME}>\n" + _arguments("<parameter={{ k }}>" + _RAW + "</parameter>\n") + "</function>"
_GLM = f"<tool_call>{_NAME}\n" + _arguments(f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_RAW}</arg_value>\n") + "</tool_call>"
_CPM = (
    f'<function name="{_NAME}">'
    + _arguments('<param name="{{ k }}">{{ "<![CDATA[" + v + "]]>" if v is string and "<" in v else ' + _RAW[3:] + "</param>")
    + "</function>"
)
_STEP = _INVOKE.replace("<", "<steptml:").replace("<steptml:/", "</steptml:")
_PYTHON = f"{_NAME}(" + _arguments("{{ k }}={{ v | tojson }}", ", ") + ")"

FORMATS = {
    "hermes": _chat(_each(f"<tool_call>\n{_OBJECT}\n</tool_call>\n")),
    "apriel": _chat("<tool_calls>[" + _each(_OBJECT, ", ") + "]</tool_calls>"),
    "nemotron": _chat("<TOOLCALL>[" + _each(_OBJECT, ", ") + "]</TOOLCALL>"),
    "granite": _chat("<|tool_call|>[" + _each(_OBJECT, ", ") + "]"),
    "cohere": _chat("<|START_ACTION|>[\n    " + _each(_COHERE, ",\n    ") + "\n]<|END_ACTION|>"),
    "command_r": _chat("Action: ```json\n[\n" + _each(_COHERE, ",\n") + "]```"),
    "apertus": _chat("<|tools_prefix|>[" + _each(f'{{"{_NAME}": {_ARGUMENTS}}}', ", ") + "]<|tools_suffix|>"),
    "firefunction": _chat(" functools[" + _each(_OBJECT, ", ") + "]"),
    "gigachat": _GIGA,
    "internlm": _chat(_each(f"<|action_start|><|plugin|>{_OBJECT}<|action_end|>")),
    "mistral": _chat(_each(f"[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGUMENTS}")),
    "deepseek": _chat(
        "<｜tool▁calls▁begin｜>"
        + _each(f"{_BEGIN}function{_SEP}{_NAME}\n```json\n{_ARGUMENTS}\n```{_END}", "\n")
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi": _chat(f"<|tool_calls_section_begin|>{_each(_KIMI)}<|tool_calls_section_end|>"),
    "functionary": _chat(_each(f"<function={_NAME}>{_ARGUMENTS}</function>")),
    "functionary_v3_2": _RECIPIENTS,
    "solar": _chat(f"<|tool_calls|>{_each(_SOLAR)}<|calls|>"),
    "name_and_json": _chat(_each(f"<tool_call>{_NAME}\n{_ARGUMENTS}\n</tool_call>")),
    "qwen3_coder": _chat(_each(f"<tool_call>\n{_CODER}\n</tool_call>\n")),
    "seed_oss": _chat(_each(f"<seed:tool_call>\n{_SEED}\n</seed:tool_call>\n")),
    "glm": _chat(_each(f"\n{_GLM}")),
    "minimax": _chat(f"\n<minimax:tool_call>\n{_each(_INVOKE + chr(10))}</minimax:tool_call>"),
    "minimax_m3": _NEST_MACRO
    + _chat(
        "{{ ns }}<tool_call>\n"
        + _each(f'{{{{ ns }}}}<invoke name="{_NAME}">{{{{ show(c.function.arguments) }}}}{{{{ ns }}}}</invoke>\n')
        + "{{ ns }}</tool_call>"
    ),
    "deepseek_dsml": _chat(f"\n\n<｜DSML｜function_calls>\n{_each(_DSML)}</｜DSML｜function_calls>"),
    "step3": _chat(_each(_STEP)),
    "minicpm": _chat(_each(f"\n{_CPM}")),
    "gemma": _GEMMA_MACRO + _chat(_each(f"<|tool_call>call:{_NAME}{{{{ show(c.function.arguments, '<|\"|>') }}}}<tool_call|>")),
    "function_gemma": _GEMMA_MACRO
    + _chat(_each(f"<start_function_call>call:{_NAME}{{{{ show(c.function.arguments, '<escape>') }}}}<end_function_call>")),
    "harmony": _MESSAGES.replace("CALLS", _HARMONY).replace("FINAL", "<|channel|>final"),
    "muse": _MESSAGES.replace("CALLS", _MUSE).replace("FINAL", " to=user"),
    "olmo3": _chat("<function_calls>" + _each(_PYTHON, "\n") + "</function_calls>"),
    "pythonic": _chat("<|tool_call_start|>[" + _each(_PYTHON, ", ") + "]<|tool_call_end|>"),
    "llama3_json": _chat(_each(f'{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}', "; ")),
}


@lru_cache
def probe(template: str) -> ParserProbe:
    return ParserProbe(_access(template)[1])


def written(name: str, *calls: ToolCall) -> str:
    """The calls as the template of a format writes them."""
    text = probe(FORMATS.get(name, name)).write(*calls)
    assert text is not None
    return text


def shown(calls: Sequence[ToolCall]) -> list[tuple[str, dict, bool]]:
    return [(call.name, call.arguments, call.error is not None) for call in calls]
