"""One retriever for many trainers: the HTTP server behind `agentfly search-server`, its command line, and its client."""
