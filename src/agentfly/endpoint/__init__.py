"""The policy behind the protocols of others: OpenAI Chat Completions and Responses, Anthropic Messages.

calls       one request and its answer, whatever the dialect; what answers implements `Answerer`
server      HTTP on loopback: keys, streams, errors in the client's own shape
chat, responses, messages    the dialects: JSON to a Call, an Answer to JSON or events
"""
