"""The dashboard: `agentfly view [RUNS_DIR]` serves pages over the stores of runs, live while training goes on.

    app       routes, headers, static files; `Dashboard` is the server
    api       the JSON of runs, chains, groups, environments, health and comparison: every shape is in its docstring
    library   runs by name and their readers; a statement is interrupted after two seconds
    live      /api/changes: which run moved
    chat_api  /api/chat: conversations with a checkpoint, the only thing that a page can start (`chat` is one, `chats` are all)
    command   the command line
    static/   the pages: plain ES modules, served as they are

Needs `agentfly[view]`. Everything but the conversations only reads.
"""
