"""Which tokens the next step computes, and what the tokens of a step mean for its requests."""
