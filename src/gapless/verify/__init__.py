"""What shows that no legal order of the streams changes a token: races, exploration, and planning by simulation."""
