"""What runs a decoder: whole prompts and mixed steps, decode steps of few tokens."""
