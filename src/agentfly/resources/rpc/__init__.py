"""Calls to an environment over a connection.

trainer   client (one Worker per connection) --frames--> instance_server, in a worker --> environment
                                             `-frames--> env_server, over WebSocket --> instances of any placement
worker    worker_main (process, sandbox), container_main (container) start `instance_server`
"""
