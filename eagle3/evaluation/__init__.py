"""How good a drafter is: on held-out shards, in live decoding, and behind a running server."""
