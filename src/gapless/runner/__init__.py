"""A plan on three streams: one step is one H2D copy, a constant number of launches, one D2H copy."""
