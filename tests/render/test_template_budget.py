"""A stranger's template ends: its loops, calls and texts have a budget, and none of them stops the process."""

from __future__ import annotations

import pytest

from agentfly.render.template import ChatTemplate, TemplateRefused

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 2000000000 }}",
    "a long list": "{{ ([1] * 100000) * 100000 }}",
    "doubling": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "squaring": "{% set n = namespace(x='aa') %}{% for i in range(9) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "squaring by a filter": "{% set n = namespace(x='aa') %}{% for i in range(9) %}"
    "{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
    "a list in itself": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x|tojson }}",
    "such a list as text": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a macro that calls itself twice": "{% macro f(n) %}"
    "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro that calls itself for ever": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a recursive loop": "{% for x in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "text in loops": "{% for a in range(9999) %}{% for b in range(99) %}" + "x" * 500 + "{% endfor %}{% endfor %}",
    "a block that grows": "{% set x %}{% for i in range(99999) %}{{ 'a' * 999999 }}{% endfor %}{% endset %}{{ x }}",
    "a width": "{{ 'a'.center(2000000000) }}",
    "a width of a filter": "{{ 'a'|center(2000000000) }}",
    "a width of a format": "{{ '%2000000000d' % 1 }}",
    "a width of an argument": "{{ '%*d' % (2000000000, 1) }}",
    "a width in braces": "{{ '{:2000000000}'.format(1) }}",
    "a width in braces by an argument": "{{ '{:{}}'.format('a', 2000000000) }}",
    "a width of the filter format": "{{ '%2000000000d'|format(1) }}",
    "tabs": "{% set x = '\t' * 99999 %}{{ x.expandtabs(999999) }}",
    "indentation": "{% set x = '\n' * 99999 %}{{ x|indent(99999, blank=true) }}",
    "a join": "{% set x = 'a' * 999999 %}{{ x.join(range(99999)|list|map('string')) }}{{ ([x] * 9999)|join(x) }}",
    "a translation": "{% set x = 'a' * 99999 %}{{ x.translate({97: x}) }}",
    "a power": "{{ 10 ** 10 ** 8 }}",
    "powers": "{% set n = namespace(x=7) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "lorem ipsum": "{{ lipsum(n=99999999) }}",
    **{
        f"{name} of lists in themselves": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
        "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}" + text
        for name, text in {
            "a comparison": "{{ n.x == n.y }}", "a search": "{{ n.x in [n.y] }}", "a test": "{{ n.x is eq(n.y) }}",
            "a maximum": "{{ [n.x, n.y]|max }}", "a selection": "{{ [n.x]|select('eq', n.y)|list }}",
        }.items()
    },
    "a key": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}"
    "{{ {n.x: 1}|length }}",
    "slices": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% set y = x[::-1] %}{% endfor %}",
    "sums": "{% for i in range(9999) %}{% set y = range(99999)|sum %}{% endfor %}",
    "lazy attributes": "{% for i in range(9999) %}{% set y = range(99999)|map(attribute='real')|sum %}{% endfor %}",
    "searches in a text": "{% set x = 'a' * 999999 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    "fields of a format": "{{ ('{a}' * 9999).format_map({'a': 'x' * 99999}) }}",
    "maps": "{{ range(99999)|map('string')|map('center', 999999)|join }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused(name: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(ENDLESS[name], {}).render([{"role": "user", "content": "hi"}], None, True)


def test_long_conversations_render_within_the_budget() -> None:
    source = (
        "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.role ~ ': ' ~ m.content.strip()|trim }}"
        "{{ m.content.split('</think>')[-1].replace('a', 'bb') }}{{ loop.length }}"
        "{{ messages|length }}{% endfor %}{{ tools|tojson }}"
    )
    messages = [{"role": "user", "content": "a word " * 5000} for _ in range(300)]
    tools = [{"name": "big", "parameters": {"maximum": 10**15, "width": "%2000000000d"}}]
    text = ChatTemplate(source, {}).render(messages, tools, True)
    assert text.count("user: ") == 300
    assert text.count("300300") == 300
    assert '"maximum": 1000000000000000' in text


def test_each_rendering_has_its_own_budget() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ i }}{% endfor %}", {})
    assert len({template.render([], None, True) for _ in range(3)}) == 1
