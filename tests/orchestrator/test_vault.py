"""What the vault lets go of, and what it finds again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from anabranch.model import layout_for
from anabranch.orchestrator.vault import Vault, Version
from anabranch.queue.blobs import make_claim
from tests.harness import make_spec

SPEC = make_spec("run")


def version(value: float) -> Version:
    theta = np.full(3, value, np.float32)
    return Version(theta, None, make_claim("_", theta.data.cast("B"), "fp32"), None)


def vault() -> Vault:
    blobs: Any = None
    made = Vault(SPEC, blobs, layout_for(SPEC, [("a", (3,)), ("b", (3,))]), [version(0), version(1)])
    made.prepared[7] = version(2)
    return made


def test_a_commit_lets_go_of_what_was_based_on_the_version_before() -> None:
    made = vault()
    for entry, fragment, base in ((b"1-0", 0, 3), (b"2-0", 0, 2), (b"3-0", 0, 4), (b"4-0", 1, 3)):
        offer: Any = SimpleNamespace(message=SimpleNamespace(fragment=fragment, base=base))
        made.in_hand["w", entry] = (offer, np.zeros(3, np.float32))
    merged = made.prepared[7]
    made.install(0, 7, 3)
    assert made.versions[0] is merged
    assert not made.prepared
    assert {entry for _, entry in made.in_hand} == {b"3-0", b"4-0"}


def test_a_version_that_is_merged_and_not_yet_stored_is_found() -> None:
    made = vault()
    old, other, new = *made.versions, made.prepared[7]
    digests = [new.theta_claim.digest, other.theta_claim.digest]
    assert made.matching(digests) == [new, other]
    assert made.matching([old.theta_claim.digest, other.theta_claim.digest]) == [old, other]
    assert made.matching([bytes(32), other.theta_claim.digest]) is None
