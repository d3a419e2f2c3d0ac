"""The WebShop world: a shop of text pages in which a chain searches, compares and buys what an instruction asks for.

    env.py        WebShop, the environment; tools.py, reward.py, tasks.py, solver.py, demos.py: what an agent is trained with
    catalogue/    products, goals, search and nouns; from WebShop's published files, or generated from word lists
    shop/         one visit: pages, actions and the score of a purchase; the same in a terminal

Nothing is imported here: each module is loaded on first use.
"""
