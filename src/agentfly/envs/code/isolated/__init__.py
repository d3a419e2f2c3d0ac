"""Unit tests that run in another session than the code they test, so that the code cannot read, patch or outvote them.

    trainer, run.py            opens both sessions and carries requests and answers between them as text
    tests' session, judge.py   runs the tests with stand-ins for what the solution defines; counts the tests that pass
    solution's session,        runs the solution; answers each request with plain data
    data
      solution.py
    both sessions, wire.py     plain data to text and back

    judge -- {"op": "call", "name", "args"} --> run -- the same text --> solution
    judge <-- {"v": value} or {"e": error} ---- run <-- the same text -- solution

The tests, the expected values and every comparison are where no line of the solution runs. All that a solution can do is
answer. If the tests hand over what is not data, for example a function, they cannot run isolated; the tests alone decide that.
"""
