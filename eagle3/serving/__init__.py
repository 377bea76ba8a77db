"""From checkpoint to a directory that an engine serves."""
