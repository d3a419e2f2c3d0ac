from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentfly.tools.docstring import parse_docstring


def test_a_google_docstring_gives_its_summary_and_arguments():
    text = """Search the shop.

    Slow for
    long queries.

    Args:
        query (str, optional): what to look for,
            in plain words
        limit: how many: at most 10
        **rest: the rest

    Returns:
        list: the products
    """
    summary, arguments = parse_docstring(text)
    assert summary == "Search the shop.\nSlow for long queries."
    assert arguments == {
        "query": "what to look for, in plain words",
        "limit": "how many: at most 10",
        "rest": "the rest",
    }


def test_a_numpy_docstring_gives_its_summary_and_arguments():
    text = """Search the shop.

    Parameters
    ----------
    query : str
        What to look for,
        in plain words.
    low, high : int
        Prices.

    Returns
    -------
    list
        not an argument
    """
    summary, arguments = parse_docstring(text)
    assert summary == "Search the shop."
    assert arguments == {"query": "What to look for, in plain words.", "low": "Prices.", "high": "Prices."}


def test_param_lines_are_understood():
    text = """Search.

    :param str query: what to look for
        in plain words
    :param limit: how many
    :returns: products
    """
    assert parse_docstring(text) == ("Search.", {"query": "what to look for in plain words", "limit": "how many"})


def test_a_section_on_one_line_ends_the_summary():
    assert parse_docstring("Add.\n\nReturns: the sum") == ("Add.", {})


def test_an_argument_that_is_called_like_a_section_is_an_argument():
    text = "Note it.\n\nArgs:\n    note: what to note\n    returns: what it gives"
    assert parse_docstring(text)[1] == {"note": "what to note", "returns": "what it gives"}


def test_no_docstring_is_no_summary():
    assert parse_docstring(None) == ("", {})


@given(st.lists(st.sampled_from(["Args:", "    x: y", "Parameters", "----", "x : int", ":param a: b", "", "  ", "text", "\t"])))
def test_any_docstring_can_be_parsed(lines):
    summary, arguments = parse_docstring("\n".join(lines))
    assert isinstance(summary, str)
    assert all(isinstance(name, str) and description for name, description in arguments.items())
