"""Calls to an environment over a connection.

trainer   client (one Worker per connection) --frames--> server (InstanceServer, in the worker) --> environment
worker    worker_main (process, sandbox), container_main (container) start `instance_server`
server    env_server: `agentfly envs serve`, frames over WebSocket
"""
