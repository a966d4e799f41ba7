"""Which tokens a request's grammar allows next: compiled once, followed token by token, as bit masks."""
