"""The search world: questions that are answered by looking things up in a corpus, on the web, or on a search server.

    env.py         SearchEnv, the environment; sources.py says what it searches; view.py what a model reads
    tools.py       search(query), retrieve(id) and its other spelling open(id)
    retrieval.py   the interface of a retriever; bm25.py, dense.py and hybrid.py are three; client.py asks a server
    corpus.py      passages on disk, memory-mapped; passages.py reads the published formats
    server.py      the search server; command.py is `agentfly search-server`; http.py the little of HTTP it needs
    web.py         search providers with a key; turns.py keeps their rate; web_cache.py remembers what they said
    world.py       an invented world; articles.py writes it down, questions.py asks about it
    tasks.py       the task sets; loaders.py reads HotpotQA-, NQ- and 2Wiki-shaped question files
    reward.py      retrieval_recall; solver.py answers every generated question; demos.py plays dialogues

Nothing is imported here: each file is loaded when its name is asked for.
"""
