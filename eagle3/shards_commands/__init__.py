"""Sub-commands of ``python -m eagle3.shards``: arguments in, table and exit code out."""
