"""The process around an engine: token ids in over ZeroMQ, token ids out."""
