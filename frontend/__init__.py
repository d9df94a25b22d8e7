"""The process that speaks OpenAI's HTTP API and routes to workers."""
