"""The model layer: ``transformers`` modules on the engine's paged attention."""
