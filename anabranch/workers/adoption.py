"""Taking a merged fragment into live parameters: one policy per name, all behind one interface.

`overwrite` now; `blend` and `rebase` come with the issue that compares them. What a store must offer is
`ParameterStore`; torch and numpy implement it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


class ParameterStore(Protocol):
    """A model's live parameters, fragment by fragment, and the base each fragment was last given.

    Only the training thread touches it, at step boundaries.
    """

    def delta(self, fragment: int) -> Float32:
        """Δ = Θ_base − θ as a new flat vector [size of the fragment]."""
        ...

    def load(self, fragment: int, theta: Float32) -> None:
        """Make `theta` both live parameters and base."""
        ...

    def initial(self, fragment: int) -> Float32:
        """The live parameters as a flat vector [size], before anything was adopted."""
        ...


class Adoption(Protocol):
    """How a new version enters the live parameters."""

    def adopt(self, store: ParameterStore, fragment: int, theta: Float32) -> None: ...


class Overwrite:
    """θ ← Θ_new (Decoupled DiLoCo, α = 0): what was trained and not sent is discarded."""

    def adopt(self, store: ParameterStore, fragment: int, theta: Float32) -> None:
        store.load(fragment, theta)


POLICIES: dict[str, type[Adoption]] = {"overwrite": Overwrite}
