"""Calls to an environment behind a socket: frames, client, server, the worker's programs, the environment server."""
