"""An OpenAI-compatible server: one process for the engine, one for HTTP and text."""
