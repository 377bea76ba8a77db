"""Jobs of a sweep side by side on one machine, each on devices of its own."""
