"""The code world: a Python session for each chain, tasks that a program solves, and rewards that run programs.

    env.py           CodeInterpreter, the environment; session.py opens the sessions in which it runs cells
    tools.py         code_interpreter(code), the tool that runs cells in it
    reward.py        code_answer, code_output, unit_tests; isolated/ runs tests in another session than the code
    tasks.py         seeded tasks with known answers, of the kinds in task_kinds.py and kinds.json; solver.py solves each
    demos.py         demonstrations of these tasks
    loaders.py       reads files in the shape of GSM8K, MBPP and HumanEval
    gsm8k.py         the published word problems as a task set; gsm8k_demos.py turns their worked answers into programs

Nothing is imported here: each file loads when its name is used.
"""
