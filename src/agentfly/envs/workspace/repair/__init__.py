"""Generated repositories with planted bugs.

grammar.py    draws right functions: names, constants and order from a seed
bugs.py       plants a bug: one changed line of a function, with the inputs on which it shows
tasks.py      the task sets `repair` and `easy_repair`, in four levels
solver.py     undoes the planted edits; demos.py records it in the words of an agent
"""
