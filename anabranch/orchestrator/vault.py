"""The tensors of a run as the synchronizer holds them: Θ and momentum per fragment, contributions in hand.

Numbers only: fetching, verifying, merging and uploading. What to do with them is the core's business. Everything
heavy runs in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from numpy.typing import NDArray
from pydantic import ValidationError

from anabranch.errors import CheckpointError, LayoutMismatch, MalformedMessage, SpecError, UnusablePayload
from anabranch.faults import fail_at
from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.codecs import decode, encode, encoded_bytes
from anabranch.merge.fragments import Layout
from anabranch.merge.guards import inspect, is_finite
from anabranch.merge.names import Kind
from anabranch.merge.outer import OuterOptimizer
from anabranch.model import Float32, flatten, layout_for
from anabranch.orchestrator.core.events import Offer
from anabranch.orchestrator.core.instructions import Merge
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.keys import SYNCHRONIZER
from anabranch.spec import COUNTER, RunSpec, is_running

ABSURD_NORM = 1e30  # no training produces it; a few of them would leave float32's range
LAYOUT_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass
class Version:
    """One fragment's tensors and where their bytes are. `momentum` None: zeros, before the first merge."""

    theta: Float32  # [size]
    momentum: Float32 | None
    theta_claim: messages.Claim
    momentum_claim: messages.Claim | None


Newborn = tuple[Layout, list[Version]]


@dataclass
class Vault:
    """See the module's docstring. `layout` is None before birth."""

    spec: RunSpec
    blobs: RedisBlobs
    layout: Layout | None = None
    versions: list[Version] = field(default_factory=list)
    newborn: Newborn | None = None  # version 0, uploaded, not committed
    in_hand: dict[tuple[str, bytes], tuple[Offer, Float32]] = field(default_factory=dict)  # by sender and entry
    prepared: dict[int, Version] = field(default_factory=dict)  # by round: merged, uploaded, not committed

    def __post_init__(self) -> None:
        merge = self.spec.merge
        self._rules = MergeRules(matrix=merge.matrix, embedding=merge.embedding)
        self._outer = OuterOptimizer(merge.outer_lr, merge.outer_momentum)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="merge")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- contributions ------------------------------------------------------------------------------------

    async def fetch(self, offer: Offer) -> None:
        """Fetch and verify one contribution; raises a `PayloadError` that says what is wrong with it."""
        assert self.layout is not None
        fragment, claim = self.layout.fragments[offer.message.fragment], offer.message.claim
        codec = self.spec.workers.codec
        if claim.codec != codec:
            raise UnusablePayload(f"codec {claim.codec!r}, the run uses {codec!r} (workers.codec)")
        exact = fragment.size - fragment.weights
        expected = encoded_bytes(codec, fragment.size, exact)
        if claim.bytes != expected:
            raise UnusablePayload(
                f"wrong shape: {claim.bytes} bytes, fragment {fragment.index} has {expected} "
                f"({fragment.size} parameters of {codec})"
            )
        data = await self.blobs.get(claim, expected)
        fail_at("after fetch")

        def verify() -> Float32:
            flat = decode(codec, data, fragment.size, exact)
            inspect(fragment, flat, max_norm=self.spec.limits.max_delta_norm or ABSURD_NORM)
            return flat

        flat = await asyncio.get_running_loop().run_in_executor(self._threads, verify)
        self.in_hand[offer.sender, offer.entry] = (offer, flat)

    def drop(self, sender: str, entry: bytes) -> None:
        self.in_hand.pop((sender, entry), None)

    # --- merging ------------------------------------------------------------------------------------------

    async def merge(self, order: Merge) -> tuple[messages.Claim | None, str]:
        """Merge, take the outer step and upload; the new version's claim, or None and why there is none."""
        assert self.layout is not None
        fragment = self.layout.fragments[order.fragment]
        old = self.versions[order.fragment]
        deltas = [self.in_hand[offer.sender, offer.entry][1] for offer, _ in order.parts]
        weights = [weight for _, weight in order.parts]

        def compute() -> tuple[Float32, Float32] | str:
            gradient = merge_fragment(fragment, deltas, weights, self._rules)
            if gradient is None:
                return "nothing to merge: all weights are zero"
            plain = [(start, stop) for _, start, stop in fragment.buffers]
            theta, momentum = self._outer.step(old.theta, old.momentum, gradient, plain=plain)
            if not (is_finite(theta) and is_finite(momentum)):
                return "the outer step left float32's range: Θ stays as it is"
            return theta, momentum

        result = await asyncio.get_running_loop().run_in_executor(self._threads, compute)
        if isinstance(result, str):
            return None, result
        theta, momentum = result
        fail_at("after merge")
        self.prepared[order.round] = await self.upload(theta, momentum)
        return self.prepared[order.round].theta_claim, ""

    async def upload(self, theta: Float32, momentum: Float32 | None) -> Version:
        """Blobs of our own, on a TTL until a commit keeps them."""
        ttl_s = self.spec.limits.blob_ttl_s
        theta_claim = await self.blobs.put(SYNCHRONIZER, encode("fp32", theta), "fp32", ttl_s)
        momentum_claim = None
        if momentum is not None:
            momentum_claim = await self.blobs.put(SYNCHRONIZER, encode("fp32", momentum), "fp32", ttl_s)
        return Version(theta, momentum, theta_claim, momentum_claim)

    async def upload_again(self, version: Version) -> None:
        """A commit found a chunk missing (its TTL ran out during an outage): the bytes are still here."""
        ttl_s = self.spec.limits.blob_ttl_s
        await self.blobs.put_again(version.theta_claim, encode("fp32", version.theta), ttl_s)
        if version.momentum is not None and version.momentum_claim is not None:
            await self.blobs.put_again(version.momentum_claim, encode("fp32", version.momentum), ttl_s)

    def matching(self, digests: Sequence[bytes]) -> list[Version] | None:
        """The versions that have these digests, one per fragment, prepared ones included; None if one is not here."""
        known = {v.theta_claim.digest: v for v in [*self.prepared.values(), *self.versions]}
        found = [known.get(digest) for digest in digests]
        return None if None in found else [version for version in found if version is not None]

    def install(self, fragment: int, round_number: int, base: int) -> None:
        """A commit is stored: its version is current, what was based on the one before is not."""
        self.versions[fragment] = self.prepared.pop(round_number)
        for key, (offer, _) in list(self.in_hand.items()):
            if offer.message.fragment == fragment and offer.message.base <= base:
                del self.in_hand[key]

    def install_newborn(self) -> None:
        """The birth is stored."""
        assert self.newborn is not None
        self.layout, self.versions = self.newborn
        self.newborn = None

    # --- birth and loading --------------------------------------------------------------------------------

    async def take_init(self, offer: messages.Init) -> Newborn:
        """Fetch and verify version 0 as a worker sent it, and upload it under our own name."""
        wire = messages.unpack(bytes(await self.blobs.get(offer.layout, LAYOUT_LIMIT_BYTES)))
        layout = Layout.from_wire(wire)
        expected = layout_for(
            self.spec,
            [(t.name, t.shape) for t in layout.tensors],
            {t.name: t.kind for t in layout.tensors if t.is_buffer},
        )
        if expected.hash != layout.hash:
            raise LayoutMismatch(expected.first_difference(layout) or "its tensors are in another order")
        claims = _read_claims(bytes(await self.blobs.get(offer.fragments, LAYOUT_LIMIT_BYTES)))
        if len(claims) != len(layout.fragments):
            raise MalformedMessage(f"{len(claims)} fragments sent, {len(layout.fragments)} expected")
        flats = []
        for fragment, claim in zip(layout.fragments, claims, strict=True):
            flats.append(await self._download(claim, fragment.size))
            await asyncio.to_thread(inspect, fragment, flats[-1], max_norm=ABSURD_NORM)
        return layout, [await self.upload(flat, None) for flat in flats]

    async def take_file(self, path: Path) -> Newborn:
        """Version 0 from a safetensors file (`--init`)."""
        tensors = await asyncio.to_thread(_read_safetensors, path)
        buffers = {name: self._kind_in_file(name, array) for name, array in tensors.items()}
        travel = {name: array.shape for name, array in tensors.items() if buffers[name] != "stays"}
        kinds = {name: cast("Kind", kind) for name, kind in buffers.items() if kind is not None}
        layout = layout_for(self.spec, list(travel.items()), kinds)
        versions = []
        for fragment in layout.fragments:
            flat = await asyncio.to_thread(flatten, [tensors[t.name] for t in fragment.tensors])
            await asyncio.to_thread(inspect, fragment, flat, max_norm=ABSURD_NORM)
            versions.append(await self.upload(flat, None))
        return layout, versions

    def _kind_in_file(self, name: str, array: NDArray[Any]) -> Kind | Literal["stays"] | None:
        """None: a parameter. A file does not say which of its tensors are buffers: types do, and the names of running
        statistics."""
        counts = array.dtype.kind in "iu" or name.endswith(COUNTER)
        buffer = counts or is_running(name)
        if array.dtype.kind == "b" or (buffer and not self.spec.merge.carries(name, whole=True)):
            return "stays"
        return ("counter" if counts else "statistic") if buffer else None

    async def load(self, layout: Layout, claims: Sequence[tuple[messages.Claim, messages.Claim | None]]) -> None:
        """Fetch what `state` names; `BlobMissing` or `BlobCorrupt` if the server lost or changed it."""
        versions = []
        for fragment, (theta_claim, momentum_claim) in zip(layout.fragments, claims, strict=True):
            theta = await self._download(theta_claim, fragment.size)
            momentum = await self._download(momentum_claim, fragment.size) if momentum_claim is not None else None
            versions.append(Version(theta, momentum, theta_claim, momentum_claim))
        self.layout, self.versions = layout, versions

    async def _download(self, claim: messages.Claim, size: int) -> Float32:
        """One fragment's Θ or momentum, [size]."""
        return decode("fp32", await self.blobs.get(claim, encoded_bytes("fp32", size)), size)


def _read_claims(data: bytes) -> list[messages.Claim]:
    try:
        return [messages.Claim.model_validate(item) for item in messages.unpack(data)]
    except (TypeError, ValidationError) as error:
        raise MalformedMessage(f"the list of initial fragments is not one of claims: {error}") from None


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors: dict[str, NDArray[Any]] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--init {path}: not a readable safetensors file: {error}") from None
    if not tensors:
        raise SpecError(f"--init {path}: holds no tensor")
    return tensors
