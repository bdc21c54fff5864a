"""Taking a merged fragment into live parameters: one policy per name, all behind one interface (DESIGN section 6).

| policy | on a merged fragment | what was trained and not merged |
| --- | --- | --- |
| `overwrite` | θ ← Θ_new | is discarded |
| `blend` | θ ← α·θ + (1−α)·Θ_new | stays, scaled by α, and is sent again with the next contribution |
| `rebase` | θ ← Θ_new + (θ − Θ_base) + Δ_applied | stays whole, and is sent with the next contribution |

`rebase` may leave it at overwriting where next to nothing was unmerged (`workers.rebase_above`). With 0.1 at least
nine tenths of everybody's work are merged; who makes many steps between two versions loses the few that it made while
its contribution was on its way, and trains from the global model itself.

Work that the run refused for what it is (not finite, a larger step than allowed) is never kept: it would be refused
for ever. That is the learner's rule, whatever the policy.

Δ_applied is what the merge took of us, as it was sent (zero if we were refused or late). Since it is the *encoded* Δ
that is added back, what a lossy codec rounded away stays in θ and travels with the next contribution.

What a store must offer is `ParameterStore`; torch and numpy implement it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.spec import WorkersSpec

Float32 = NDArray[np.float32]


class ParameterStore(Protocol):
    """A model's live parameters, fragment by fragment, and the base each fragment was last given.

    Only the training thread touches it, at step boundaries. Vectors are flat, [size of the fragment].
    """

    def delta(self, fragment: int) -> Float32:
        """Δ = Θ_base − θ as a new vector."""

    def load(self, fragment: int, theta: Float32) -> None:
        """Make `theta` both live parameters and base."""

    def blend(self, fragment: int, theta: Float32, alpha: float) -> bool:
        """θ ← α·θ + (1−α)·`theta`, and `theta` is the base. False, and nothing changed, if θ is not finite."""

    def rebase(self, fragment: int, theta: Float32, applied: Float32 | None) -> bool:
        """θ ← `theta` + (θ − Θ_base) + `applied`, and `theta` is the base. False, and nothing changed, if θ is not
        finite."""

    def initial(self, fragment: int) -> Float32:
        """The live parameters, before anything was adopted."""


class Adoption(Protocol):
    """How a new version enters the live parameters."""

    keeps: ClassVar[bool]  # whether what was trained and not merged stays in the parameters

    def carry(
        self, store: ParameterStore, fragment: int, theta: Float32, applied: Float32 | None, unmerged: float
    ) -> bool:
        """Take `theta` in and keep what was not merged. `applied`: the Δ of ours that was merged since the base, as
        sent; `unmerged`: what share of the tokens since the base it leaves. False, and nothing changed: the live
        parameters are to be overwritten (they may not be finite)."""


class Overwrite:
    """Decoupled DiLoCo, α = 0."""

    keeps: ClassVar[bool] = False

    def carry(
        self, store: ParameterStore, fragment: int, theta: Float32, applied: Float32 | None, unmerged: float
    ) -> bool:
        return False


@dataclass(frozen=True)
class Blend:
    """Streaming DiLoCo: `alpha` is the share of the live parameters that stays."""

    keeps: ClassVar[bool] = True
    alpha: float = 0.5

    def carry(
        self, store: ParameterStore, fragment: int, theta: Float32, applied: Float32 | None, unmerged: float
    ) -> bool:
        return store.blend(fragment, theta, self.alpha)


@dataclass(frozen=True)
class Rebase:
    """Work that was not merged is carried over to the new base as if it had been done there, if it is at
    least the share `above`."""

    keeps: ClassVar[bool] = True
    above: float = 0.0

    def carry(
        self, store: ParameterStore, fragment: int, theta: Float32, applied: Float32 | None, unmerged: float
    ) -> bool:
        return unmerged >= self.above and store.rebase(fragment, theta, applied)


POLICIES: dict[str, type[Adoption]] = {"overwrite": Overwrite, "blend": Blend, "rebase": Rebase}


def adoption_of(settings: WorkersSpec) -> Adoption:
    """The policy that a run's settings name."""
    if settings.adoption == "blend":
        return Blend(settings.blend_alpha)
    if settings.adoption == "rebase":
        return Rebase(settings.rebase_above)
    return POLICIES[settings.adoption]()
