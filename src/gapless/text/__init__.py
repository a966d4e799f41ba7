"""Text in and out: incremental detokenization, stop strings, chat templates."""
