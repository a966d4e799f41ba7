"""From a folder, a name or an object to a model."""
