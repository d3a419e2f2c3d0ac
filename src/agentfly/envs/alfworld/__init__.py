"""ALFWorld: households in text, on an engine of our own. Find a thing, clean, heat or cool it, put it where it belongs.

    game.py      a household and its task, read from PDDL or from facts; goal.py says when it is won and how far it has come
    engine.py    State: one playthrough of a game: commands in, the original's words out
    oracle.py    a plan from any state; plays.py sets it out as a person would search
    homes.py     seeded households; tasks.py the task sets; loaders.py the published game files
    env.py       AlfWorld, the environment; tools.py acts on it, reward.py scores it, demos.py writes dialogues

Nothing is imported here: each file is loaded when its name is asked for.
"""
