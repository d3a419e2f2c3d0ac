"""The workspace world: a file tree, a shell and tests for each chain, and graders that its cheats do not reach.

    env.py        Workspace, the environment; inside.py is its end behind the walls, trees.py makes the task's tree
    tools.py      bash, read, edit, grep, run_tests, submit
    grade.py      what is taken from a chain's tree into a fresh workspace; values.py, process.py and verifier.py judge
    reward.py     workspace_success, workspace_tests
    repair/       generated repositories with planted bugs: tasks, solver, demonstrations
    readers.py    Harbor and Terminal-Bench folders, SWE-bench-like rows

Nothing is imported here: each file loads when its name is used.
"""
