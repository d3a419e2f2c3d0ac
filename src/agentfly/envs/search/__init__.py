"""The search world: questions that a model answers by looking things up in a corpus, on a search server, or on the web.

    env.py        SearchEnv, the environment            tasks.py     the task sets
    sources.py    which retriever a source opens        loaders.py   HotpotQA-, NQ-, 2Wiki- and KILT-shaped question files
    tools.py      search(query), retrieve(id), open     reward.py    retrieval_recall
    view.py       what the model reads                  solver.py    answers the generated questions; demos.py records it
    retrieve/     corpora, BM25, dense and hybrid       serve/       the search server and its client
    web/          search providers                      generated/   the invented encyclopaedia

Importing this package loads none of them.
"""
