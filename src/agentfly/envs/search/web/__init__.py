"""Web search through providers with a key: their request formats, a rate limit per provider, and a cache of their answers."""
