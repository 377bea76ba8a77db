"""From prompts or token ids to a directory of hidden states that can be trusted."""
