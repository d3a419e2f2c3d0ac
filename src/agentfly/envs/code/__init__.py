"""The code world: a Python session for each chain, tasks that a program solves, and rewards that run programs.

    env.py       CodeInterpreter, the environment; session.py opens the sessions it runs cells in
    tools.py     code_interpreter(code), the tool that acts on it
    tasks.py     seeded tasks with known answers; loaders.py reads GSM8K-, MBPP- and HumanEval-shaped files
    gsm8k.py     the published word problems as a task set; gsm8k_demos.py makes programs of their worked answers
    reward.py    code_answer, code_output, unit_tests
    solver.py    cells that solve every task of tasks.py

Nothing is imported here: each file is loaded when its name is asked for.
"""
