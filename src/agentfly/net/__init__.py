"""HTTP for the whole package: addresses, one retrying client, and what every server shares (Host, token, limits).

`address` and `guard` need no package. `client` imports httpx late. `server` needs `agentfly[serve]`.
"""
