"""How good a drafter is: on held-out shards, and behind a running server."""
