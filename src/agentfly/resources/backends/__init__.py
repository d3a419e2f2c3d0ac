"""Where an environment instance lives: on the event loop, in a thread, process, sandbox or container, or behind a server."""
