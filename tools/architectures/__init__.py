"""Which models are computed rightly: tiny random ones of every architecture against ``transformers``."""
