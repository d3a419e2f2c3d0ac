"""Worlds: one folder each, with environment, tasks, tools and reward; and `check.check_env`, which examines any environment.

Nothing is imported here: a world is found by its name (`plugins`) and loaded on first use.
"""
