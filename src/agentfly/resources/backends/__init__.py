"""The placements of environments: event loop, thread, worker process, sandbox, container, server.

backend_of --> thread                                          Instance called directly
          `--> process, sandbox, container, http --> remote    Instance -> rpc.client.Worker -> frames -> worker
"""
