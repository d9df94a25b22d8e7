"""The real engine: vLLM's ``AsyncLLM`` behind the door of ``worker.engine``."""
