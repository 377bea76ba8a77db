"""Axis legend and shared array types.

====  =============================================================================
T     rows of one pack (total tokens after the shift)
N     tokens of one document
L     rows kept after trimming padding
A     rows that are computed beyond step-0 keys and values: those that some loss reads, or all
R     rows that the loss of one TTT step reads
G     rows whose verifier logits are needed
H     hidden size of verifier and drafter
KH    concatenated aux states, ``num_aux_layers * H``
Hq    query heads          Hkv  key/value heads          D  head_dim
V     draft vocabulary     W    verifier vocabulary
S     TTT steps
====  =============================================================================

Names in hot code end in these letters (``logits_RV``). Annotations are checked at run time in tests
only, so training pays nothing for them.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

TokenIds = Int[Tensor, " T"]
RowMask = Bool[Tensor, " T"]
AuxHidden = Float[Tensor, "T KH"]
Hidden = Float[Tensor, "T H"]
Computed = Float[Tensor, "A H"]
Logits = Float[Tensor, "R V"]
RowLoss = Float[Tensor, " R"]
