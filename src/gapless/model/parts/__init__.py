"""Parts of decoders that keep something else of the past than keys and values."""
