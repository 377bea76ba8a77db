"""The drafter, its TTT unroll and the frozen verifier tensors."""
