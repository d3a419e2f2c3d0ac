"""ALFWorld: households in text, on an engine that answers as the original does. Find, clean, heat, cool and place things.

    game.py      a household and its task, read from PDDL or from facts; goal.py says what wins it; wording.json words it
    engine.py    State: one playthrough of a game
    oracle.py    a plan from any state; plays.py searches for things as a person would
    homes.py     seeded households (homes.json); tasks.py the task sets; loaders.py the published game files
    env.py       AlfWorld, the environment; tools.py acts on it, reward.py scores it, demos.py writes dialogues

Nothing is imported here: each module is loaded on first use.
"""
