"""Distillation losses and acceptance statistics, one value a row, over a whole TTT chain.

====================  =============================================================
name                  loss of a row (p verifier, q drafter)
====================  =============================================================
``kl``                sum p (log p - log q), forward KL, the default of the trainer
``reverse_kl``        sum q (log q - log p)
``js``                Jensen-Shannon divergence
``ce``                -log q[argmax p]
``tv``                sum |p - q| / 2
``nla``               -log sum min(p, q)
``lk_hybrid``         KL early, TV late (arXiv 2602.23881)
====================  =============================================================
"""

from eagle3.ops.distillation.chain import IMPLEMENTATIONS, ChainLoss, chain_loss
from eagle3.ops.distillation.mix import LOSSES, check_mix

__all__ = ["IMPLEMENTATIONS", "LOSSES", "ChainLoss", "chain_loss", "check_mix"]
