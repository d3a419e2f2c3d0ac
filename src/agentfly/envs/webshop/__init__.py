"""The WebShop world: a shop of text pages in which a chain searches, compares and buys what an instruction asks for.

    env.py        WebShop, the environment; shop.py is one visit: pages, clickables, actions
    catalogue.py  all products with their goals and search; products.py, files.py and kept.py read the published files
    analyse.py, porter.py, index.py     BM25 as the original's search engine ranks
    goals.py, score.py, fuzzy.py, nouns.py     instructions and the published score
    generate.py, wares.py, easy.py      catalogues that are made here, so that nothing has to be downloaded
    tasks.py, tools.py, reward.py, solver.py, demos.py     what an agent is trained with
    page.py       the shop as a web page, for a person

Nothing is imported here: each file is loaded when its name is asked for.
"""
