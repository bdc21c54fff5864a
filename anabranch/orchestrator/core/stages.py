"""The stages of a round, and what leads from one to the next. Drawn in ARCHITECTURE.md, which a test compares."""

from __future__ import annotations

from typing import Literal

Stage = Literal["collecting", "grace", "overtime", "short", "merging", "merged", "abandoned"]

#: collecting  the quorum was never there
#: grace       it was, and the grace window is open
#: overtime    the same, past the round's deadline: whoever brings it below its quorum ends it
#: short       the window ended, but the quorum was lost again (a contribution replaced, K raised)
#: merging     closed: nothing enters it any more
TRANSITIONS: dict[Stage, dict[Stage, str]] = {
    "collecting": {
        "grace": "quorum reached, somebody called is missing",
        "merging": "quorum reached, nobody is missing",
        "abandoned": "deadline; nobody left who was called; a new timeline",
    },
    "grace": {
        "merging": "nobody is missing any more, or the window ends (at once, if no time is left to wait)",
        "overtime": "deadline",
        "short": "the window ends below the quorum",
        "abandoned": "deadline below the quorum; nobody left who was called; a new timeline",
    },
    "overtime": {
        "merging": "nobody is missing any more, or the window ends",
        "abandoned": "below the quorum; a new timeline",
    },
    "short": {
        "merging": "the quorum is back",
        "abandoned": "deadline; nobody left who was called; a new timeline",
    },
    "merging": {
        "merged": "the new version is uploaded",
        "abandoned": "no version came out; a new timeline",
    },
    "merged": {},
    "abandoned": {},
}

#: Nothing enters a round any more.
OVER: frozenset[Stage] = frozenset({"merging", "merged", "abandoned"})
