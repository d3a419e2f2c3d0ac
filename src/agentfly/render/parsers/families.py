"""The built-in parsers, one row per format, in the order in which they are tried for a chat template.

A row gives the marks of the calls, of the thinking, and around prose. Rows of the same class differ in nothing else.
"""

from __future__ import annotations

import re

from .harmony import Harmony
from .json_calls import JsonCalls
from .literal_calls import GemmaCalls, PythonCalls
from .named_json import NamedJson, Recipients
from .nested import NestedCalls
from .reply import THINK
from .tagged import TaggedCalls, invoke

SEED_THINK = (("<seed:think>", "</seed:think>"), *THINK)
MISTRAL_THINK = (("[THINK]", "[/THINK]"), *THINK)
COHERE_THINK = (("<|START_THINKING|>", "<|END_THINKING|>"), *THINK)
COHERE_PROSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")

# One JSON object, or a list of them, between marks.
hermes = JsonCalls(marks=(("<tool_call>", "</tool_call>"),), fenced=True)
apriel = JsonCalls(
    marks=(("<tool_calls>", "</tool_calls>"),),
    thinking=(("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), *THINK),
    drop=("[END FINAL RESPONSE]",),
)
nemotron = JsonCalls(marks=(("<TOOLCALL>", "</TOOLCALL>"),))
granite = JsonCalls(marks=(("<|tool_call|>", ""),), skip=("<|/tool_call|>",), drop=("<response>", "</response>"))
cohere = JsonCalls(marks=(("<|START_ACTION|>", "<|END_ACTION|>"),), key="parameters", thinking=COHERE_THINK, drop=COHERE_PROSE)
command_r = JsonCalls(
    marks=(("Action: ```json", "```"), ("Action:```json", "```")), key="parameters", thinking=COHERE_THINK, drop=COHERE_PROSE
)
apertus = JsonCalls(
    marks=(("<|tools_prefix|>", "<|tools_suffix|>"),),
    by_name=True,
    thinking=(("<|inner_prefix|>", "<|inner_suffix|>"), *THINK),
)
firefunction = JsonCalls(marks=(("functools[", ""),))
gigachat = JsonCalls(marks=(("function call<|role_sep|>", ""),), drop=("<|message_sep|>",))
internlm = JsonCalls(marks=(("<|action_start|><|plugin|>", "<|action_end|>"),), key="parameters")
llama3_json = JsonCalls(marks=(("<|python_tag|>", ""),), key="parameters", bare=True, chained=True)

# A name, then the JSON of the arguments.
mistral = NamedJson(
    opening="[TOOL_CALLS]",
    head=re.compile(r"\s*(?P<name>[^\[\]{}\s]{1,128})(?:\[CALL_ID\](?P<id>[^\[\]{}\s]{1,128}))?(?:\[ARGS\])?\s*"),
    shape='[TOOL_CALLS]NAME[ARGS]{"argument": value}',
    lists=True,
    thinking=MISTRAL_THINK,
)
deepseek = NamedJson(
    opening="<｜tool▁call▁begin｜>",
    head=re.compile(r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\n`{<]{1,128})(?:\n|<｜tool▁sep｜>)\s*(?:```(?:json)?)?\s*"),
    closing="<｜tool▁call▁end｜>",
    between="```",
    skip=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    shape="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>",
)
kimi = NamedJson(
    opening="<|tool_call_begin|>",
    head=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^:<{\s]{1,128})(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>\s*"),
    closing="<|tool_call_end|>",
    skip=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    shape="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>",
)
functionary = NamedJson(
    opening="<function=",
    head=re.compile(r"(?P<name>[^<>{\n]{1,128})>\s*"),
    closing="</function>",
    shape='<function=NAME>{"argument": value}</function>',
)
functionary_v3_2 = Recipients()
solar = NamedJson(
    opening="<|tool_call:begin|>",
    head=re.compile(r"(?P<id>[^<{]{0,128})<\|tool_call:name\|>(?P<name>[^<{]{1,128})<\|tool_call:args\|>\s*"),
    closing="<|tool_call:end|>",
    shape="<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>",
    thinking=(("<|think|>", "<|end|>"), *THINK),
    drop=("<|begin|>assistant", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>", "<|flush|>"),
)
name_and_json = NamedJson(
    opening="<tool_call>",
    head=re.compile(r"\s*(?P<name>[^<>{\s]{1,128})\s*"),
    closing="</tool_call>",
    shape='<tool_call>NAME{"argument": value}</tool_call>',
)

# Every argument between its own tags.
qwen3_coder = TaggedCalls(
    opening="<function=",
    head=re.compile(r"(?P<name>[^<>\n]{1,128})>"),
    key_mark="<parameter=",
    key=re.compile(r"(?P<key>[^<>\n]{1,128})>"),
    value_end="</parameter>",
    closing="</function>",
    trims=True,
    blocks=("<tool_call>",),
    skip=("</tool_call>",),
)
seed_oss = TaggedCalls(
    opening=qwen3_coder.opening,
    head=qwen3_coder.head,
    key_mark=qwen3_coder.key_mark,
    key=qwen3_coder.key,
    value_end=qwen3_coder.value_end,
    closing=qwen3_coder.closing,
    blocks=("<seed:tool_call>",),
    skip=("</seed:tool_call>",),
    thinking=SEED_THINK,
)
glm = TaggedCalls(
    opening="<tool_call>",
    head=re.compile(r"\s{0,8}(?P<name>[^<>\s]{1,128})(?:<tool_sep>)?"),
    key_mark="<arg_key>",
    key=re.compile(r"(?P<key>[^<>\n]{1,128})</arg_key>\s{0,8}<arg_value>"),
    value_end="</arg_value>",
    closing="</tool_call>",
    skip=("<tool_calls>", "</tool_calls>"),
)
minimax = invoke("", "minimax:tool_call", "function_calls")
minimax_m3 = NestedCalls(token="]<]minimax[>[", thinking=(("<mm:think>", "</mm:think>"), *THINK))
deepseek_dsml = invoke("｜DSML｜", "function_calls", "tool_calls")
step3 = invoke(
    "steptml:",
    drop=(
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>function<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
)
minicpm = TaggedCalls(
    opening="<function name=",
    head=re.compile(r"\"(?P<name>[^\"<>\n]{1,128})\">"),
    key_mark="<param name=",
    key=re.compile(r"\"(?P<key>[^\"<>\n]{1,128})\">"),
    value_end="</param>",
    closing="</function>",
)

# As in a programming language.
pythonic = PythonCalls()
olmo3 = PythonCalls(marks=(("<function_calls>", "</function_calls>"),), bare=False)
gemma = GemmaCalls(thinking=(("<|channel>thought", "<channel|>"), *THINK))
function_gemma = GemmaCalls(marks=(("<start_function_call>", "<end_function_call>"),), quote="<escape>")

# Messages with a recipient.
harmony = Harmony()
muse = Harmony(inner=invoke("atem:", "function_calls"), typed=False)

MODELS = {
    "hermes": "Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, Bielik",
    "qwen": "another name of `hermes`",
    "apriel": "Apriel, Hunyuan A13B, Jamba",
    "nemotron": "Nemotron Nano 2",
    "granite": "Granite 3, Phi-4 mini",
    "cohere": "Command R7B, Command A, Cohere2",
    "command_r": "Command R and R+",
    "apertus": "Apertus",
    "firefunction": "Firefunction",
    "gigachat": "GigaChat 3",
    "internlm": "InternLM 2.5",
    "mistral": "Mistral, Ministral, Magistral, Devstral (list and name forms)",
    "deepseek": "DeepSeek V3, R1, V3.1",
    "kimi": "Kimi K2, K2 Thinking",
    "functionary": "Functionary v3.1",
    "functionary_v3_2": "Functionary v3.2",
    "solar": "Solar Open",
    "name_and_json": "GLM-4 and others with `<tool_call>NAME{...}</tool_call>`",
    "qwen3_coder": "Qwen3-Coder, Nemotron 3, Step 3.5, MiMo",
    "seed_oss": "Seed-OSS",
    "glm": "GLM 4.5 to 4.7, Laguna, Hunyuan 3",
    "minimax": "MiniMax M2",
    "minimax_m3": "MiniMax M3",
    "deepseek_dsml": "DeepSeek V3.2, V4",
    "step3": "Step 3",
    "minicpm": "MiniCPM 5",
    "gemma": "Gemma 4",
    "function_gemma": "FunctionGemma",
    "harmony": "gpt-oss",
    "muse": "Muse Glimmer",
    "olmo3": "OLMo 3",
    "pythonic": "Llama 3.2 and 4, LFM2, LFM2.5",
    "llama3_json": "Llama 3.1 and 3.3, xLAM",
}
"""Models whose chat templates write the format, for the documentation."""
