"""Unit tests that run in another session than the code they test, so that the code cannot read, patch or outvote them.

    trainer, run.py            opens both sessions; carries requests and answers between them, unread and of limited length
    tests' session, judge.py   runs the tests with stand-ins for what the solution defines; counts the tests that pass
                    plan.py    decides from the tests alone whether they can run isolated, before any solution runs
                    forms.py   what tests may do that needs the solution in their own process
    solution's session,        runs the solution; answers each request with data
      solution.py
    both sessions, wire.py     the grammar: plain data to text and back

    judge -- {"op": "call", "on", "args"} --> run -- the same text --> solution
    judge <-- {"v": value} or {"e": error} -- run <-- the same text -- solution

The tests, the expected values and every comparison are where no line of the solution runs. All that a solution can do is
answer with values of the grammar, which has no code in it. Anything else is a failed test.
"""
